"""Checkpoint folders to models: the native decoder, whose blocks are filled layer by layer, or the fallback."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from compile.block_linear import WIDENED, BlockEmbedding, BlockPart
from compile.linear import NotFinite
from compile.op_registry import runs_triton
from compile.start_times import START
from multigpu.tensor_parallel import UNSHARDED, Shard
from sharesd.models import checkpoint
from sharesd.models.architectures import config_from_hf, model_types
from sharesd.models.base import CausalModel
from sharesd.models.checkpoint import Progress, silent
from sharesd.models.decoder import Block, Decoder
from sharesd.models.decoder_config import DecoderConfig, UnsupportedArchitecture
from sharesd.models.hf_config import check_sizes
from sharesd.models.hub import resolve
from sharesd.models.mixture import ExpertMLP
from sharesd.models.weight_mapping import (
    EMBEDDING,
    HEAD,
    LAYERS,
    block_tensors,
    check_finite,
    check_tensor_parallel,
    check_tensors,
    copy_tensors,
    cut_part,
    decoder_tensors,
    is_conv_kernel,
    is_router,
    module_names,
    not_finite,
    rename_tensors,
    report_unused,
    split_tensors,
    text_name,
)

if TYPE_CHECKING:
    from multigpu.pipeline_parallel import PipelinePlan

MakeLinear = Callable[[list[Tensor], Tensor | None, torch.device], nn.Module]
"""Maker of a linear from parts of its rows, on a device.

The second argument is its bias.

Raises NotFinite.
"""


def fill_block(
    block: Block,
    config: DecoderConfig,
    values: Mapping[str, Tensor],
    *,
    device: torch.device,
    make_linear: MakeLinear | None,
) -> None:
    """Give a block on the meta device its weights, on `device`.

    `values`: names as in `block_tensors`. `make_linear`: linears instead of torch's.
    """
    own_dtype = ("mlp.router",) if config.experts is not None and config.experts.wide_router else ()
    if make_linear is not None:
        for path, names in module_names(config, block.kind).items():
            linear = attrgetter(path)(block)
            if type(linear) is nn.Linear and path not in own_dtype:
                bias = None
                if linear.bias is not None:
                    bias = torch.cat([values[f"{name}.bias"].to(linear.bias.dtype) for name in names])
                block.set_submodule(path, make_linear([values[f"{name}.weight"] for name in names], bias, device))
    if isinstance(block.mlp, ExpertMLP) and device.type == "cuda":
        block.mlp.allocate_together(device)
    for module in block.modules():
        for key, unset in list(module.named_parameters(recurse=False)):
            if unset.is_meta:  # to_empty would import sympy for half a second
                empty = torch.empty(unset.shape, dtype=unset.dtype, device=device)
                setattr(module, key, nn.Parameter(empty, requires_grad=False))
    for name, parameter in block_tensors(block, config):
        parameter.copy_(values[name])
    block.eval().requires_grad_(False)


__all__ = ["decoder_config", "load_decoder", "load_model", "resolve"]

log = logging.getLogger(__name__)

_HEAD_MODULE = HEAD.removesuffix("weight")
Tensors = Callable[[], Iterable[tuple[str, Tensor]]]
"""Yields a checkpoint's tensors again at each call: names and values."""
BlockCallback = Callable[[Decoder, int], None]
"""Callback with a decoder and the number of a block just loaded.

Called in the checkpoint's order. It may quantize or move the block before the next one takes memory.
"""


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    tensors: Tensors | None = None,
    on_block_loaded: BlockCallback | None = None,
    make_linear: MakeLinear | None = None,
    mmap_embeddings: bool = False,
    part: Shard = UNSHARDED,
    split: PipelinePlan | None = None,
) -> CausalModel:
    """Return the native decoder if it is exact, else transformers' model.

    `tensors` replace the folder's weight files. Only the native decoder takes these and the options that follow, see
    `load_decoder`.

    Raises:
        ValueError: neither serves the architecture, or the checkpoint is damaged or incomplete.
    """
    try:
        config = native_config(folder, torch.device(device))
    except UnsupportedArchitecture as reason:
        if tensors is not None or on_block_loaded is not None or part != UNSHARDED or split is not None:
            raise
        with START.phase("import transformers"):
            from sharesd.models.hf import load_hf
            from sharesd.models.lora import refuse_adapter

        raw = checkpoint.read_config(folder)
        refuse_adapter(raw, folder)
        log.info("%s; using the transformers fallback", reason)
        try:
            return load_hf(folder, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        except UnsupportedArchitecture as error:
            if raw.get("model_type") not in model_types():
                raise
            raise UnsupportedArchitecture(f"{reason}; through transformers: {error}") from error
    log.info("%s: native decoder", config.model_type)
    return load_decoder(
        folder,
        dtype=dtype,
        device=device,
        progress=progress,
        tensors=tensors,
        on_block_loaded=on_block_loaded,
        make_linear=make_linear,
        mmap_embeddings=mmap_embeddings,
        part=part,
        split=split,
    )


def stored_tensors(folder: Path, *, outlines: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a folder, its adapter merged.

    `outlines`: blocks have no bytes, see `BlockPart.without_bytes`.
    """
    if (folder / checkpoint.TARGET_QUANT).exists():
        from sharesd.models.quantized.target import quantized_tensors

        config, source = decoder_config(folder), _source_tensors(folder)
        return cast("Iterator[tuple[str, Tensor]]", quantized_tensors(folder, config, source, outlines=outlines))
    return _source_tensors(folder, outlines=outlines)


def _source_tensors(folder: Path, *, outlines: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors, before `--target-quant`."""
    if checkpoint.is_quantized(folder):
        from sharesd.models.quantized.folder import stored_parts

        return cast("Iterator[tuple[str, Tensor]]", stored_parts(folder, outlines=outlines))
    if (folder / checkpoint.STORED).exists():
        from sharesd.models.gguf.weights import stored_blocks  # whose package takes time to import

        return cast("Iterator[tuple[str, Tensor]]", stored_blocks(folder, outlines=outlines))
    if (folder / checkpoint.ADAPTER).is_dir():
        from sharesd.models.lora import merged

        return merged(folder, plain_tensors(folder))
    return plain_tensors(folder)


def plain_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a folder's weight files."""
    return chain.from_iterable(map(checkpoint.read_tensors, checkpoint.weight_files(folder)))


def embedding_dtype(folder: Path) -> torch.dtype | None:
    """Return the stored embedding's dtype, or None if no header has it."""
    for file in checkpoint.weight_files(folder):
        if file.suffix == ".safetensors":
            for name, tensor in checkpoint.read_tensors(file):
                if text_name(name) == EMBEDDING:
                    return tensor.dtype
    return None


def decoder_config(folder: Path) -> DecoderConfig:
    """Return the DecoderConfig of a checkpoint folder.

    Raises UnsupportedArchitecture, or ValueError if config.json is damaged.
    """
    raw = checkpoint.read_config(folder)
    with checkpoint.damage_named(folder / "config.json"):
        if (section := checkpoint.quantization_of(raw)) is not None:
            from sharesd.models.quantized.folder import layout_of

            layout_of(section)
            raw = checkpoint.without_quantization(raw)
        config = config_from_hf(raw, refuses_unread=True)
        if checkpoint.has_weights(folder):
            checkpoint.check_stored(folder, partial(check_sizes, config))
    if (
        config.tie_word_embeddings
        and checkpoint.has_weights(folder)
        and _has_other_head(folder, checkpoint.identity(folder))
    ):
        _warn_of_head(folder)
        return replace(config, tie_word_embeddings=False)
    return config


@cache
def _warn_of_head(folder: Path) -> None:
    """Warn once: a start reads the config several times."""
    log.warning("%s: tie_word_embeddings is true, and another lm_head is stored, which is used", folder)


def native_config(folder: Path, device: torch.device) -> DecoderConfig:
    """Return the DecoderConfig of a folder that the native decoder runs on this device; errors as `decoder_config`."""
    config = decoder_config(folder)
    if config.cpu_only and device.type != "cpu":
        raise UnsupportedArchitecture(
            f"architecture {config.model_type!r} is {config.cpu_only}, which the native decoder runs on CPUs alone"
        )
    if config.undivided and device.type != "cpu" and not runs_triton(device):
        raise UnsupportedArchitecture(
            f"architecture {config.model_type!r} is {config.undivided}, which the native decoder runs on GPUs by the "
            "Triton kernels alone"
        )
    return config


@cache
def _has_other_head(folder: Path, identity: str) -> bool:
    """Return True if the stored LM head is not the embedding."""
    if (folder / checkpoint.STORED).exists():  # whose config was made from its tensors
        return False
    is_quantized = checkpoint.is_quantized(folder)  # of which no linear is to be read here
    stored = plain_tensors(folder) if is_quantized else _source_tensors(folder)
    found = {
        text_name(name): tensor for name, tensor in stored if text_name(name).startswith((EMBEDDING, _HEAD_MODULE))
    }
    if is_quantized and any(name.startswith(_HEAD_MODULE) and name != HEAD for name in found):
        return True
    if HEAD not in found or EMBEDDING not in found:
        return False
    embedding_VD, head_VD = found[EMBEDDING], found[HEAD]
    if embedding_VD.shape != head_VD.shape:
        return True
    pieces = zip(embedding_VD.split(4096), head_VD.split(4096), strict=True)
    return any(not torch.equal(a, b.to(a.dtype)) for a, b in pieces)


def load_decoder(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress = silent,
    tensors: Tensors | None = None,
    on_block_loaded: BlockCallback | None = None,
    make_linear: MakeLinear | None = None,
    mmap_embeddings: bool = False,
    part: Shard = UNSHARDED,
    split: PipelinePlan | None = None,
) -> Decoder:
    """Load a checkpoint, or `tensors` instead of its files, into a decoder.

    Weights are put on `device`, or on the devices of a `split`; of each linear only the rows of `part`. A block takes
    memory once all its tensors are found; `make_linear` makes its linears, instead of torch's. With `mmap_embeddings`,
    embedding and head stay in their file if the dtype is the same, and the system reads rows as they are needed.

    Raises:
        ValueError: tensors are missing, unexpected or wrongly shaped, or sizes do not divide into such parts.
    """
    config = decoder_config(folder)
    check_tensor_parallel(config, part.size)
    if tensors is None and not checkpoint.is_quantized(folder) and not (folder / checkpoint.STORED).exists():
        check_tensors(folder, checkpoint.tensor_outlines(folder), config)  # others are checked when they are resolved
    stored = stored_tensors(folder) if tensors is None else tensors()
    with checkpoint.damage_named(folder / "config.json"):
        decoder = Decoder(config, dtype=dtype, device=device, block_device="meta", part=part, split=split)
    decoder.eval().requires_grad_(False)
    decoder.eos_ids = checkpoint.eos_ids(folder)
    num_tensors = [len(list(block_tensors(block, config))) for block in decoder.blocks]
    found: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)  # of incomplete blocks

    def put(name: str, parameter: Tensor, tensor: Tensor) -> None:
        is_table = name in (EMBEDDING, HEAD)
        if is_table and isinstance(tensor, BlockPart) and tensor.type == WIDENED:
            tensor = tensor.raw if dtype != torch.float32 or parameter.is_cuda else tensor
        mapped = mmap_embeddings and is_table
        if mapped and tensor.dtype == dtype and tensor.device == parameter.device:
            owner: nn.Module = decoder.embed if name == EMBEDDING else decoder.head
            owner.weight.data = tensor  # a tied head shares the parameter
            return
        if isinstance(tensor, BlockPart) and is_table:
            assert make_linear is not None
            try:
                _put_table(decoder, name, tensor, dtype, make_linear)
            except NotFinite as error:
                raise not_finite(folder, name) from error
            return
        if not parameter.is_meta:
            parameter.copy_(tensor)
            return
        number, _, rest = name.removeprefix(LAYERS).partition(".")
        index = int(number)
        found[index][rest] = tensor
        if len(found[index]) == num_tensors[index]:
            device = decoder.split.device_of(index)
            block, values = cast(Block, decoder.blocks[index]), found.pop(index)
            try:
                fill_block(block, config, values, device=device, make_linear=make_linear)
            except NotFinite as error:
                _require_finite(folder, {f"{LAYERS}{index}.{rest}": value for rest, value in values.items()})
                raise ValueError(f"{folder}: weights of layer {index} exceed {dtype}; use --dtype bf16") from error
            if on_block_loaded is not None:
                on_block_loaded(decoder, index)

    unused: list[str] = []
    named = split_tensors(rename_tensors(stored, config, folder, unused), config, part)

    def is_checked_elsewhere(name: str, tensor: Tensor) -> bool:
        if name == EMBEDDING:  # of which only rows of the text are read
            return not config.tie_word_embeddings
        is_linear = name.startswith(LAYERS) and tensor.ndim == 2
        own = is_conv_kernel(name, config) or is_router(name, config)  # which may have its own dtype
        return make_linear is not None and is_linear and not own

    what = f"architecture {config.model_type!r}"
    copy_tensors(dict(decoder_tensors(decoder)), named, folder, what, progress, put, is_checked_elsewhere)
    report_unused(folder, unused)
    tied = config.tie_word_embeddings and isinstance(decoder.head, nn.Linear)
    if tied and decoder.head.weight.device != decoder.embed.weight.device:
        decoder.head.weight.data.copy_(decoder.embed.weight)
    return decoder


def _require_finite(folder: Path, found: Mapping[str, Tensor | BlockPart]) -> None:
    """Raise ValueError that names the first tensor with NaN or infinite values, blocks included."""
    from compile.cuda.block_form import is_finite  # late: a start without damage needs none of it

    for name, value in found.items():
        check_finite(folder, name, value)
        if isinstance(value, BlockPart) and not is_finite(value):
            raise not_finite(folder, name)


def _put_table(decoder: Decoder, name: str, table: Tensor, dtype: torch.dtype, make_linear: MakeLinear) -> None:
    """Give a decoder its embedding or LM head of blocks.

    A tied head is the embedding, unless it is on another device or shared out.
    """
    first, last = decoder.split.stages[0].device, decoder.split.stages[-1].device
    is_tied, part = decoder.config.tie_word_embeddings, decoder.part
    is_head = is_tied and first == last and part == UNSHARDED
    if name == EMBEDDING:
        linear = make_linear([table], None, first)
        decoder.set_submodule("embed", BlockEmbedding(linear, dtype, is_head=is_head))
        if is_head:
            decoder.set_submodule("head", linear)
        table = cut_part(table, partial(part.cut, merged=table.shape[:1]))
    if name == HEAD or (is_tied and not is_head):
        decoder.set_submodule("head", make_linear([table], None, last))
