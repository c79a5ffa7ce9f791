"""Checkpoint folders of trained heads, in the layouts of serving engines."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharesd.drafters import registry
from sharesd.drafters.heads.config import SWITCHES, HeadConfig, Kind, head_class, reads_depths
from sharesd.drafters.heads.foreign import refuse_foreign
from sharesd.drafters.heads.head import Head
from sharesd.models import checkpoint
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.hf_config import check_sizes
from sharesd.models.weight_mapping import block_tensors, copy_tensors
from sharesd_files import atomic_files

_AGAIN = "download the head again"


@torch.no_grad()
def load_head(folder: Path, target: Decoder) -> Head:
    """Return a head on its target's device, in its dtype.

    Call it while the target has its plain linears. Raises ValueError if tensors or fields are missing, unknown, wrongly
    shaped, or for another target.
    """
    head, stored = _empty_head(folder, target)
    copy_tensors(dict(_slots(head)), stored, folder, f"a head of kind {head.config.kind}")
    return head.eval().requires_grad_(False)


def check_head(folder: Path, config: DecoderConfig) -> Kind:
    """Return the kind of a head; ValueError as `load_head` by names, shapes and types only.

    Neither the target of this config nor the head is allocated.
    """
    head, stored = _empty_head(folder, Decoder(config, device="meta"))
    copy_tensors(
        dict(_slots(head)),
        ((stored_name, name, tensor.to("meta")) for stored_name, name, tensor in stored),
        folder,
        f"a head of kind {head.config.kind}",
        put=lambda name, parameter, tensor: None,
        is_checked_elsewhere=lambda name, tensor: True,
    )
    return head.config.kind


def _empty_head(folder: Path, target: Decoder) -> tuple[Head, list[tuple[str, str, Tensor]]]:
    """Return a head without values, and its tensors: stored name, name and values."""
    raw, files = checkpoint.read_config(folder), checkpoint.weight_files(folder)
    if (quantized := checkpoint.quantization_of(raw)) is not None:
        method = quantized.get("quant_method", "unknown method")
        raise ValueError(f"{folder} is already quantized ({method}); give the full-precision head")
    with checkpoint.damage_named(folder):
        refuse_foreign(raw, ())
    tensors = {}
    for stored_name, tensor in chain.from_iterable(map(checkpoint.read_tensors, files)):
        name = stored_name.removeprefix("model.")
        name = f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
        if not name.endswith("rotary_emb.inv_freq"):  # old files store what is computed
            tensors[name] = stored_name, tensor
    with checkpoint.damage_named(folder):
        refuse_foreign(raw, tensors)
        kind = _kind(raw, tensors)
        if head_class(kind).READS_DEPTHS and not reads_depths(raw):  # fc has no effect then, as in vLLM
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("fc.")}
        config = HeadConfig.of(raw, kind, target.config)
        check_sizes(config.block, sum(file.stat().st_size for file in files))
        _check_switches(tensors, config)
        ids_K = _draft_ids(tensors, config)
        head = new_head(
            config,
            target,
            ids_K=ids_K,
            own_embed="embed_tokens.weight" in tensors,
            own_lm_head="lm_head.weight" in tensors,
            fc_bias="fc.bias" in tensors,
        )
    return head, [(stored_name, name, tensor) for name, (stored_name, tensor) in tensors.items()]


def new_head(config: HeadConfig, target: Decoder, *, ids_K: Tensor | None = None, **options: bool) -> Head:
    """Return a head without values; of `own_embed` and `Head.OPTIONS`, ignore what its kind lacks."""
    if ids_K is not None:
        ids_K = ids_K.to(target.get_buffer("cos_0").device)
    cls = head_class(config.kind)
    known = {name: value for name, value in options.items() if name in cls.OPTIONS | {"own_embed"}}
    head: Head = cls(config, target, ids_K=ids_K, **known)
    return head


def save_head(head: Head, folder: Path) -> None:
    """Write config.json and model.safetensors, also for vLLM and SGLang if EAGLE."""
    vocab_size = head.config.block.vocab_size
    tensors = {}
    for name, slot in _slots(head):
        name = f"{head.BLOCK_NAME}.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
        tensors[name] = slot.detach().cpu().contiguous()
    if head.ids is not None:
        ids_K = head.get_buffer("ids").cpu()
        tensors["d2t"] = ids_K - torch.arange(len(ids_K))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids_K, True)
    with atomic_files(folder) as fresh:
        (fresh / "config.json").write_text(json.dumps(dict(head.config.raw), indent=2) + "\n")
        checkpoint.write_tensors(tensors, fresh / "model.safetensors")


def _kind(raw: Mapping[str, Any], tensors: Mapping[str, tuple[str, Tensor]]) -> Kind:
    """Return the kind of head with these tensors; raise ValueError if unknown."""
    layouts = registry.head_specs()
    for layout in layouts:
        if not layout.is_public and raw.get("architectures") == [layout.architecture]:
            return layout.layout
    if "fc.weight" not in tensors and reads_depths(raw):
        raise ValueError("the tensor fc.weight is missing; give the folder of a trained head")
    return next((each.layout for each in reversed(layouts) if each.marks & tensors.keys()), layouts[0].layout)


def _check_switches(tensors: Collection[str], config: HeadConfig) -> None:
    """Raise ValueError for a tensor of a switch that config.json does not set."""
    for switch, prefix in SWITCHES.items():
        found = next((name for name in tensors if prefix and name.startswith(prefix)), None)
        if found is not None and switch not in config.switches:
            raise ValueError(
                f"it has the tensor {found}, but {switch} is not true in its config.json; add the key if the head was "
                "trained so, else remove the tensor"
            )


def _draft_ids(tensors: dict[str, tuple[str, Tensor]], config: HeadConfig) -> Tensor | None:
    """Take ids of the draft tokens from d2t and t2d; None: all."""
    (_, d2t_K), (_, t2d_V) = (tensors.pop(name, ("", None)) for name in ("d2t", "t2d"))
    num, vocab_size = config.draft_vocab_size, config.block.vocab_size
    if d2t_K is None:
        if num != vocab_size:
            raise ValueError(
                f"draft_vocab_size is {num} of {vocab_size} and the tensor d2t, with their ids, is missing; {_AGAIN}"
            )
        return None
    if d2t_K.shape != (num,):
        raise ValueError(f"d2t has shape {list(d2t_K.shape)} and draft_vocab_size is {num}; {_AGAIN}")
    ids_K = d2t_K.long() + torch.arange(num)
    if ids_K.min() < 0 or ids_K.max() >= vocab_size or len(ids_K.unique()) < num:
        raise ValueError(f"d2t does not name {num} distinct ids of {vocab_size} tokens; {_AGAIN}")
    known_V = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids_K, True)
    if t2d_V is not None and not torch.equal(t2d_V.bool(), known_V):
        raise ValueError(f"t2d and d2t name different tokens; {_AGAIN}")
    return ids_K


def _slots(head: Head) -> Iterator[tuple[str, Tensor]]:
    if head.embed is not None:
        yield "embed_tokens.weight", head.embed.weight.data
    for number, block in enumerate(head.blocks):
        for name, tensor in block_tensors(block, head.config.block):
            yield f"layers.{number}.{name}", tensor
    yield from head.own_tensors()
    if head.lm_head is not None and head.own_lm_head:
        yield "lm_head.weight", head.lm_head.weight.data
