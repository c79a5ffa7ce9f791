"""Quantized checkpoint folders, as they are stored or expanded to 16 bits."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compile.block_linear import NUMBERS, WIDENED, BlockPart
from sharesd.models.architectures import config_from_hf
from sharesd.models.checkpoint import (
    MODELOPT,
    QUANT_CONFIGS,
    WEIGHT_FILES,
    Progress,
    damage_named,
    identity,
    quantization_of,
    read_config,
    read_tensors,
    source_of,
    weight_files,
    without_quantization,
    write_tensors,
)
from sharesd.models.conversion_cache import converted, linked_folder, name_of, require_space
from sharesd.models.decoder_config import DecoderConfig, UnsupportedArchitecture
from sharesd.models.hf_config import check_sizes
from sharesd.models.quantized.affine import AWQ, GPTQ
from sharesd.models.quantized.auto_round import AutoRound
from sharesd.models.quantized.bitsandbytes import BitsAndBytes
from sharesd.models.quantized.compressed_tensors import CompressedTensors
from sharesd.models.quantized.floats import FBGEMM, FP8, MXFP4, Experts, ModelOpt
from sharesd.models.quantized.layout import (
    MISFIT,
    FolderLayout,
    NotAsStored,
    Planes,
    QuantSection,
    StoredLinear,
    Workers,
)
from sharesd.models.weight_mapping import (
    EMBEDDING,
    HEAD,
    KV_SCALES,
    StoredTypes,
    check_finite,
    check_tensors,
    is_kv_scale,
    parts_of_experts,
    report_unused,
    tensor_shapes,
    text_name,
)

_LAYOUTS: Mapping[str, Callable[[QuantSection], FolderLayout]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "auto-round": AutoRound,
    "intel/auto-round": AutoRound,
    "compressed-tensors": CompressedTensors,
    "bitsandbytes": BitsAndBytes,
    "mxfp4": MXFP4,
    "modelopt": ModelOpt,
    "fp8": FP8,
    "fbgemm_fp8": FBGEMM,
}
METHODS = tuple(_LAYOUTS)
"""Values of `quant_method` that are read."""


def layout_of(section: Mapping[str, Any]) -> FolderLayout:
    """Return the layout of a `quantization_config`.

    Raises ValueError for one that is not supported.
    """
    if "quant_method" not in section and (section.get("load_in_4bit") or section.get("load_in_8bit")):
        section = {**section, "quant_method": "bitsandbytes"}  # as its first versions wrote it
    settings = QuantSection(section)
    return _LAYOUTS[settings.one_of("quant_method", METHODS)](settings)


log = logging.getLogger(__name__)

_CONFIGS = ("config.json", MODELOPT, *QUANT_CONFIGS)
_SHARD_BYTES = 2 << 30
_NUMBERS = {dtype: kind for kind, dtype in NUMBERS.items()}


Linear = Callable[[], StoredLinear]
"""Reader of a quantized linear.

Its scales take memory while it is used.
"""
Weights = dict[str, Tensor | Linear]
"""Tensors of a checkpoint by name."""


def expanded_folder(folder: Path, progress: Progress, *, trust_remote_code: bool = False) -> Path:
    """Return a folder in the cache, its weights in 16 bits.

    Raises:
        ValueError: a tensor is damaged, or of a layout that is not supported.
    """
    configs = [folder / name for name in _CONFIGS if (folder / name).exists()]
    files = [*configs, *weight_files(folder)]
    name = name_of(folder)

    def write(fresh: Path) -> None:
        _expand(folder, fresh, progress, trust_remote_code)

    weights = converted(folder, files, stem=name, key="16 bits", write=write)
    return linked_folder(weights, name, source=source_of(folder))


def check_as_stored(folder: Path) -> None:
    """Raise ValueError for what cannot run as it is stored."""
    _, config, reason = _read_config(folder)
    if config is None:
        raise ValueError(f"{folder}: {reason}, and stored weights run in native decoders; use --dequantize")
    with damage_named(folder):
        _types(folder, identity(folder))


def stored_types(folder: Path) -> dict[str, str]:
    """Return the types of matrices that are blocks, or in one linear with blocks, by the decoder's names.

    So are embedding and LM head, if they are in bfloat16.
    """
    layout, config, _ = _read_config(folder)
    types = {**_types(folder, identity(folder)).types}
    for name, tensor in _read_weights(folder, layout, config).items():
        if isinstance(tensor, Tensor) and _is_widened(name, tensor):
            types[text_name(name)] = WIDENED
    return types


@cache
def _types(folder: Path, identity: str) -> StoredTypes:
    """Check the tensors of a folder and return their types; each is read once.

    Raises ValueError as `check_as_stored`.
    """
    layout, config, _ = _read_config(folder)
    assert config is not None
    stored, orders, errors = dict[str, str](), dict[str, Tensor | None](), dict[str, NotAsStored]()

    def see(stored_name: str, of_all: Tensor | StoredLinear) -> None:
        for single_name, linear in _singles(stored_name, of_all, config):
            name = text_name(single_name)
            if isinstance(linear, Tensor):
                stored[name] = _NUMBERS.get(linear.dtype, "F32")
                continue
            orders[name] = linear.order
            try:
                stored[name] = linear.block_type()
            except NotAsStored as error:  # damage comes first
                stored[name], errors[name] = "", error

    _check(folder, _read_weights(folder, layout, config), config, see)
    types = StoredTypes.of(
        stored, config, orders=orders, reasons={name: error.reason for name, error in errors.items()}
    )
    for name, error in errors.items():
        if name not in types.types:
            raise error
    return types


def reordered(folder: Path) -> Sequence[str]:
    """Return the decoder's names of matrices whose inputs are stored in another order."""
    return _types(folder, identity(folder)).reordered


def stored_parts(
    folder: Path, *, outlines: bool = False, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor | BlockPart]]:
    """Yield names and tensors of a folder; quantized linears as blocks.

    `outlines`: those of layers have no bytes. `wanted` returns True for the names that are to be yielded.
    Numbers in one linear with blocks are parts, too, and so are embedding and LM head, if they are in bfloat16.
    `check_as_stored` comes before it.
    """
    layout, config, _ = _read_config(folder)
    types = _types(folder, identity(folder))
    types.say(folder)
    weights = {name: tensor for name, tensor in _read_weights(folder, layout, config).items() if wanted(name)}
    with closing(Workers()) as workers:
        for name, linear in _each(weights, config):
            kind = types.types.get(text_name(name), "")
            if kind in NUMBERS and outlines:
                yield name, BlockPart.without_bytes(kind, *linear.shape)
            elif kind in NUMBERS:
                dtype = NUMBERS[kind]
                values = linear.to(dtype) if isinstance(linear, Tensor) else linear.values(dtype, workers.run)
                yield name, BlockPart(kind, values)
            elif not isinstance(linear, Tensor):
                yield name, linear.outline() if outlines else linear.block_part(workers.run)
            elif _is_widened(name, linear):
                yield name, BlockPart(WIDENED, linear)
            else:
                yield name, linear


def _each(weights: Weights, config: DecoderConfig | None) -> Iterator[tuple[str, Tensor | StoredLinear]]:
    """Yield weights one by one, those of all experts as one for each."""
    for name, tensor in weights.items():
        yield from _singles(name, tensor if isinstance(tensor, Tensor) else tensor(), config)


def _singles(
    name: str, linear: Tensor | StoredLinear, config: DecoderConfig | None
) -> Iterator[tuple[str, Tensor | StoredLinear]]:
    """Yield name and weights of a linear, or of each expert's if it holds those of all."""
    if not isinstance(linear, Experts) or config is None:
        yield name, linear
        return
    parts = parts_of_experts(name, config)
    for number, expert in enumerate(linear.experts):
        for first, part in enumerate(parts):
            yield part.replace("*", str(number)), expert.every(first, len(parts))


def _is_widened(name: str, tensor: Tensor) -> bool:
    return text_name(name) in (EMBEDDING, HEAD) and tensor.dtype == torch.bfloat16


def _expand(folder: Path, fresh: Path, progress: Progress, trust_remote_code: bool) -> None:
    """Write config and weights of 16 bits; everything but values is checked before."""
    raw, (layout, config, _) = without_quantization(read_config(folder)), _read_config(folder)
    with damage_named(folder):
        weights = _read_weights(folder, layout, config)
        shapes = _check(folder, weights, config)
    if config is None:
        from sharesd.models.hf import check_tensors as check_by_transformers

        check_by_transformers(folder, shapes, trust_remote_code)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    said = str(raw.get("dtype") or raw.get("torch_dtype"))
    dtype = torch.float16 if said == "float16" else torch.bfloat16
    total, done, shard, shards = sum(sizes.values()), 0, dict[str, Tensor](), list[dict[str, Tensor]]()
    require_space(fresh, sum(_stored_bytes(tensor, sizes[name]) for name, tensor in weights.items()))
    log.warning(
        "%s: %.2f GB of weights need %.2f GB in 16 bits, on disk and in memory", folder, *_gigabytes(folder, total)
    )
    names: dict[str, str] = {}

    def write() -> None:
        file = f"model-{len(shards) + 1}.safetensors"
        names.update(dict.fromkeys(shard, file))
        write_tensors(shard, fresh / file)
        shards.append({})
        shard.clear()

    with closing(Workers()) as workers:
        for name, tensor in weights.items():
            if not isinstance(tensor, Tensor):
                tensor = tensor().values(dtype, workers.run)
                if not tensor.sum(dtype=torch.float32).isfinite():
                    check_finite(folder, name, tensor)
            elif text_name(name) != EMBEDDING:  # rows of which no text may need
                check_finite(folder, name, tensor)
            shard[name] = tensor.contiguous()
            done += sizes[name]
            progress("expanding weights", done, total)
            if sum(each.nbytes for each in shard.values()) >= _SHARD_BYTES:
                write()
    if shard:
        write()
    index = {"metadata": {}, "weight_map": names}
    (fresh / f"{WEIGHT_FILES[0]}.index.json").write_text(json.dumps(index), encoding="utf-8")
    (fresh / "config.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")


def _stored_bytes(tensor: Tensor | Linear, num_weights: int) -> int:
    """Return the bytes of a tensor in an expanded checkpoint."""
    return tensor.nbytes if isinstance(tensor, Tensor) else 2 * num_weights


def _gigabytes(folder: Path, num_weights: int) -> tuple[float, float]:
    return sum(file.stat().st_size for file in weight_files(folder)) / 1e9, 2 * num_weights / 1e9


def _read_config(folder: Path) -> tuple[FolderLayout, DecoderConfig | None, UnsupportedArchitecture | None]:
    """Return layout and native config, or the reason for no such config.

    Raises ValueError if config.json cannot be used.
    """
    raw = read_config(folder)
    section = quantization_of(raw)
    assert section is not None
    with damage_named(folder / "config.json"):
        layout = layout_of(section)
        try:
            config = config_from_hf(without_quantization(raw), refuses_unread=True)
        except UnsupportedArchitecture as reason:
            return layout, None, reason
        check_sizes(config, sum(file.stat().st_size for file in weight_files(folder)))
        return layout, config, None


def _read_weights(folder: Path, layout: FolderLayout, config: DecoderConfig | None) -> Weights:
    """Return all weights, mapped, except for biases of zeros that the model has no place for.

    Raises ValueError for files that are damaged, and tensors that disagree with the config.
    """
    tensors = dict(chain.from_iterable(map(read_tensors, weight_files(folder))))
    report_unused(folder, (KV_SCALES for name in tensors if is_kv_scale(name)))
    weights = _grouped({name: tensor for name, tensor in tensors.items() if not is_kv_scale(name)}, layout)
    asked = {} if config is None else tensor_shapes(config)
    for stored in list(weights):  # AutoGPTQ writes biases for all linears
        tensor, name = weights[stored], text_name(stored)
        is_extra = name.endswith(".bias") and name not in asked and name.removesuffix("bias") + "weight" in asked
        if is_extra and isinstance(tensor, Tensor) and not tensor.any():
            del weights[stored]
    return weights


def _grouped(stored: Mapping[str, Tensor], layout: FolderLayout) -> Weights:
    """Return tensors with those of each quantized linear put together."""
    planes: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in stored.items():
        if (found := layout.names.fullmatch(name)) is not None:
            planes[found["module"]][found["plane"]] = tensor
    weights: Weights = {}
    for name, tensor in stored.items():
        found = layout.names.fullmatch(name)
        module = name.removesuffix(".weight") if found is None else found["module"]
        own = planes.get(module, {})
        is_quantized = layout.is_quantized(own)
        if is_quantized and layout.excludes(module):
            raise ValueError(f"tensor {name} is quantized, and quantization_config leaves {module} out; {MISFIT}")
        if found is not None and is_quantized:
            if layout.weight_name(module) not in weights:
                weights[layout.weight_name(module)] = partial(_linear, module, own, layout)
        elif found is not None and found["plane"] not in layout.codes:
            if found["plane"] not in layout.left_out:
                raise ValueError(f"tensor {name} has no quantized weights next to it; {MISFIT}")
        else:
            if tensor.dim() == 2 and module.endswith("_proj") and layout.includes(module):
                raise ValueError(
                    f"tensor {name} is not quantized, and quantization_config does not leave it out; {MISFIT}"
                )
            weights[name] = tensor
    return weights


def _linear(module: str, tensors: Mapping[str, Tensor], layout: FolderLayout) -> StoredLinear:
    """Return a linear; ValueError for a tensor that it does not use."""
    planes = Planes(module, tensors)
    linear = layout.linear(planes)
    for plane in sorted(planes.unread() - layout.left_out):
        if not plane.endswith("zero_point") or bool(planes[plane].float().any()):  # symmetric ones are 0
            raise planes.error(plane, "has no meaning for what quantization_config says")
    return linear


def _check(
    folder: Path,
    weights: Weights,
    config: DecoderConfig | None,
    see: Callable[[str, Tensor | StoredLinear], None] = lambda name, linear: None,
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor; `see` gets names and tensors.

    Raises ValueError for one that is missing, damaged or wrongly shaped.
    """
    found = dict[str, Tensor]()
    for name, tensor in weights.items():
        linear = tensor if isinstance(tensor, Tensor) else tensor()
        found[name] = linear if isinstance(linear, Tensor) else torch.empty(linear.shape, device="meta")
        see(name, linear)
    if config is not None:
        check_tensors(folder, found, config)
    return {name: tuple(tensor.shape) for name, tensor in found.items()}
