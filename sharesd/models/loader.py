"""Checkpoints to modules: where a model's files are, and how its tensors get into the native decoder."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multigpu.pipeline_parallel import Split
from multigpu.tensor_parallel import TILE, WHOLE, Part, require_even
from sharesd.models import checkpoint as files
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Block, Decoder, RMSNorm
from sharesd.models.decoder_config import DecoderConfig, Unsupported
from sharesd.models.hub import resolve
from sharesd.models.progress import Progress, silent

__all__ = ["decoder_config", "load_decoder", "load_model", "resolve"]

log = logging.getLogger(__name__)

Tensors = Callable[[], Iterable[tuple[str, Tensor]]]
"""Makes a checkpoint's tensors anew, one after the other: names and values."""
EachBlock = Callable[[Decoder, int], None]
"""Called with a decoder and the number of a block that has its weights now: it may quantize them, or move them away,
before the next block takes memory. The order is that of the checkpoint."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYERS = "model.layers."


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    tensors: Tensors | None = None,
    each_block: EachBlock | None = None,
    map_tables: bool = False,
    part: Part = WHOLE,
    split: Split | None = None,
) -> CausalModel:
    """The native decoder where it serves the checkpoint exactly, else transformers' own model.

    `tensors` stand in for the folder's weight files, which it need not have then. Only the native decoder takes these
    and the options that follow, see `load_decoder`.
    Raises ValueError, naming the architecture, where neither does, and for damaged or incomplete checkpoints.
    """
    try:
        config = decoder_config(folder)
    except Unsupported as reason:
        if tensors is not None or each_block is not None or part != WHOLE or split is not None:
            raise
        from sharesd.models.hf import load_hf

        log.info("%s; using the transformers fallback", reason)
        return load_hf(folder, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    log.info("%s: native decoder", config.architecture)
    return load_decoder(
        folder,
        dtype=dtype,
        device=device,
        progress=progress,
        tensors=tensors,
        each_block=each_block,
        map_tables=map_tables,
        part=part,
        split=split,
    )


def embedding_dtype(folder: Path) -> torch.dtype | None:
    """In which the embedding is stored; None where that takes more than reading a header."""
    for file in files.weight_files(folder):
        if file.suffix == ".safetensors":
            for name, tensor in files.read_tensors(file):
                if _plain_name(name) == EMBEDDING:
                    return tensor.dtype
    return None


def decoder_config(folder: Path) -> DecoderConfig:
    """The native decoder's reading of a folder's config.json; raises Unsupported, or ValueError if it is damaged."""
    raw = files.read_config(folder)
    if "quantization_config" in raw:
        method = raw["quantization_config"].get("quant_method", "unknown method")
        raise ValueError(f"{folder} is already quantized ({method}); give the full-precision checkpoint")
    return DecoderConfig.from_hf(raw)


def load_decoder(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress = silent,
    tensors: Tensors | None = None,
    each_block: EachBlock | None = None,
    map_tables: bool = False,
    part: Part = WHOLE,
    split: Split | None = None,
) -> Decoder:
    """Read a checkpoint, or `tensors` in place of its files, straight into the merged layout on `device`, or on those
    of a `split`, and of each linear the rows of this part.

    A block takes memory when the last of its tensors has been found (until then those stay in their files). With
    `map_tables` embedding and head take none, if they have the right dtype: their rows stay in the file, which the
    system reads as they are needed. Raises ValueError naming missing, unexpected or wrongly shaped tensors,
    and what cannot be cut into such parts.
    """
    config = decoder_config(folder)
    check_cuts(config, part.size)
    stored = tensors() if tensors else chain.from_iterable(map(files.read_tensors, files.weight_files(folder)))
    decoder = Decoder(config, dtype=dtype, device=device, block_device="meta", part=part, split=split)
    decoder.eval().requires_grad_(False)
    decoder.eos_ids = files.eos_ids(folder)
    num_tensors = [len(list(block_slots(block, config))) for block in decoder.blocks]
    found: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)  # of blocks which are not complete

    def put(name: str, slot: Tensor, tensor: Tensor) -> None:
        if map_tables and name in (EMBEDDING, HEAD) and tensor.dtype == dtype and tensor.device == slot.device:
            owner: nn.Module = decoder.embed if name == EMBEDDING else decoder.head
            owner.weight.data = tensor  # the head's is the embedding's, where they are tied
            return
        if not slot.is_meta:
            slot.copy_(tensor)
            return
        number, _, rest = name.removeprefix(_LAYERS).partition(".")
        index = int(number)
        found[index][rest] = tensor
        if len(found[index]) == num_tensors[index]:
            place = decoder.split.device_of(index)
            values, block = found.pop(index), Block(config, config.layers[index], part, dtype=dtype, device=place)
            for rest, slot in block_slots(block, config):
                slot.copy_(values[rest])
            decoder.blocks[index] = block.eval().requires_grad_(False)
            if each_block is not None:
                each_block(decoder, index)

    what = f"architecture {config.architecture!r}"
    fill(dict(decoder_slots(decoder)), _cut(_named(stored, config), config, part), folder, what, progress, put)
    if config.tied and decoder.head.weight.device != decoder.embed.weight.device:
        decoder.head.weight.data.copy_(decoder.embed.weight)
    return decoder


def _copy(name: str, slot: Tensor, tensor: Tensor) -> None:
    slot.copy_(tensor)


def fill(
    slots: dict[str, Tensor],
    stored: Iterable[tuple[str, str, Tensor]],
    folder: Path,
    what: str,
    progress: Progress = silent,
    put: Callable[[str, Tensor, Tensor], None] = _copy,
) -> None:
    """Put each tensor of a checkpoint (its name there, that of its slot, and its values) into its slot: `put` gets the
    slot's name, the slot, and the tensor.

    Raises ValueError naming missing, unexpected or wrongly shaped tensors.
    """
    num_slots, unexpected = len(slots), []
    for stored_name, name, tensor in stored:
        slot = slots.pop(name, None)
        if slot is None:
            unexpected.append(stored_name)
            continue
        if slot.shape != tensor.shape:
            found, wanted = list(tensor.shape), list(slot.shape)
            raise ValueError(f"{folder}: {stored_name} has shape {found} where config.json asks for {wanted}")
        put(name, slot, tensor)
        progress("loading weights", num_slots - len(slots), num_slots)
    if slots or unexpected:
        problems = [
            f"{kind} {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
            for kind, names in (("missing", list(slots)), ("unexpected", unexpected))
            if names
        ]
        raise ValueError(f"{folder} does not fit {what}: {'; '.join(problems)}")


def _named(stored: Iterable[tuple[str, Tensor]], config: DecoderConfig) -> Iterator[tuple[str, str, Tensor]]:
    """A decoder's tensors, as `fill` takes them."""
    for stored_name, tensor in stored:
        name = _plain_name(stored_name)
        if name is None or (config.tied and name == HEAD):
            continue
        if config.gemma_norm and name.endswith("norm.weight"):
            tensor = tensor.double() + 1.0  # stored minus one
        yield stored_name, name, tensor


def check_cuts(config: DecoderConfig, num_parts: int, gate_tile: int = TILE) -> None:
    """Raises ValueError for a decoder that cannot be cut into so many equal parts, `gate_tile` outputs of gate and up
    being kept together.
    """
    if num_parts == 1:
        return
    cuts = {
        "key/value heads": (config.num_kv_heads, 1),
        "outputs of o and down": (config.hidden_size, TILE),
        "outputs of gate and up": (config.mlp_size, gate_tile),
        "outputs of the head": (config.vocab_size, TILE),
    }
    require_even(num_parts, cuts)


def _cut(
    named: Iterable[tuple[str, str, Tensor]], config: DecoderConfig, part: Part
) -> Iterator[tuple[str, str, Tensor]]:
    """Of each linear's weight and bias, what this part has."""
    q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    outputs = {"q_proj": (q,), "k_proj": (k,), "v_proj": (k,), "qkv_proj": (q, k, k), "lm_head": (config.vocab_size,)}
    outputs |= {"gate_proj": (config.mlp_size,), "up_proj": (config.mlp_size,), "gate_up_proj": (config.mlp_size,) * 2}
    for stored_name, name, tensor in named:
        linear = name.rpartition(".")[0].rpartition(".")[2]
        if linear in ("o_proj", "down_proj"):
            tensor = part.cut_second(tensor)
        elif linear in outputs:
            tensor = part.cut(tensor, outputs[linear])
        yield stored_name, name, tensor


def _plain_name(name: str) -> str | None:
    """A tensor's name without the wrapping of multimodal checkpoints; None for tensors that text does not need."""
    if name.endswith("rotary_emb.inv_freq"):  # old files store what is computed
        return None
    for tower in ("vision_tower.", "multi_modal_projector."):
        if name.startswith((tower, f"model.{tower}")):
            return None
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def decoder_slots(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Where each tensor of a checkpoint goes: its name and a view of the parameter (rows of it, where merged)."""
    yield EMBEDDING, decoder.embed.weight.data
    yield "model.norm.weight", decoder.norm.weight.data
    if not decoder.config.tied:
        yield HEAD, decoder.head.weight.data
    for i, block in enumerate(decoder.blocks):
        for name, tensor in block_slots(block, decoder.config):
            yield f"{_LAYERS}{i}.{name}", tensor


def block_slots(block: Any, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Where the tensors of a layer go: names behind its number, and views. Norms may be missing."""
    attn, mlp = block.attn, block.mlp
    heads = [n * attn.head_dim for n in (attn.num_heads, attn.num_kv_heads, attn.num_kv_heads)]
    if config.architecture == "phi3":  # merged as ours
        split = {"self_attn.qkv_proj": attn.qkv, "mlp.gate_up_proj": mlp.gate_up}
        merged = []
    else:
        split = {}
        merged = [
            (attn.qkv, heads, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (mlp.gate_up, [mlp.gate_up.out_features // 2] * 2, ("mlp.gate_proj", "mlp.up_proj")),
        ]
    for name, linear in {**split, "self_attn.o_proj": attn.o, "mlp.down_proj": mlp.down}.items():
        for part, tensor in linear.named_parameters():
            yield f"{name}.{part}", tensor.data
    for linear, rows, names in merged:
        for part, tensor in linear.named_parameters():
            for name, view in zip(names, tensor.data.split(rows), strict=True):
                yield f"{name}.{part}", view
    if isinstance(block.attn_norm, RMSNorm):
        yield "input_layernorm.weight", block.attn_norm.weight.data
    if config.sandwich_norms:
        yield "post_attention_layernorm.weight", block.attn_out_norm.get_parameter("weight").data
        yield "pre_feedforward_layernorm.weight", block.mlp_norm.weight.data
        yield "post_feedforward_layernorm.weight", block.mlp_out_norm.get_parameter("weight").data
    else:
        yield "post_attention_layernorm.weight", block.mlp_norm.weight.data
    if attn.q_norm is not None and attn.k_norm is not None:
        yield "self_attn.q_norm.weight", attn.q_norm.weight.data
        yield "self_attn.k_norm.weight", attn.k_norm.weight.data
