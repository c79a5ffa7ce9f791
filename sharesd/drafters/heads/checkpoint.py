"""Trained heads from and to checkpoint folders, in the layouts that serving engines read.

There are no public layouts of parallel heads and GLIDE; docs/reference/training.md has ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sharesd.drafters.eagle.head import Eagle
from sharesd.drafters.eagle.head_eagle3 import Eagle3
from sharesd.drafters.glide.head import Glide
from sharesd.drafters.heads.config import ARCHITECTURES, HeadConfig, Kind
from sharesd.drafters.heads.head import FeatureHead, Head
from sharesd.drafters.parallel.head import Parallel
from sharesd.models import checkpoint as files
from sharesd.models.decoder import Decoder
from sharesd.models.loader import block_slots, fill

LAYER = {"eagle": "layers.0", "eagle3": "midlayer", "parallel": "layers.0", "glide": "layers.0"}
"""What the first block is called in files that we write."""


@torch.no_grad()
def load_head(folder: Path, target: Decoder) -> Head:
    """A head for this target, on its device and in its dtype. Call it while the target has its plain linears.

    Raises ValueError that names what is missing, not known, wrongly shaped, or meant for another target.
    """
    raw = files.read_config(folder)
    if "quantization_config" in raw:
        raise ValueError(f"{folder} is quantized; give the full-precision head")
    tensors = {}
    for stored_name, tensor in chain.from_iterable(map(files.read_tensors, files.weight_files(folder))):
        name = stored_name.removeprefix("model.")
        name = f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
        if not name.endswith("rotary_emb.inv_freq"):  # old files store what is computed
            tensors[name] = stored_name, tensor
    try:
        config = HeadConfig.of(raw, _kind(raw, tensors), target.config)
        ids_K = _draft_ids(tensors, config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    head = new_head(
        config,
        target,
        ids_K=ids_K,
        own_embed="embed_tokens.weight" in tensors,
        own_lm_head="lm_head.weight" in tensors,
        fc_bias="fc.bias" in tensors,
    )
    stored = ((stored_name, name, tensor) for name, (stored_name, tensor) in tensors.items())
    fill(dict(_slots(head)), stored, folder, f"a head of kind {config.kind}")
    return head.eval().requires_grad_(False)


def new_head(
    config: HeadConfig,
    target: Decoder,
    *,
    ids_K: Tensor | None = None,
    own_embed: bool = False,
    own_lm_head: bool = False,
    fc_bias: bool | None = None,
) -> Head:
    """A head without values; see `Eagle`, `Glide`, and `Eagle3` and `Parallel`, which always have an LM head of their
    own."""
    if ids_K is not None:
        ids_K = ids_K.to(target.get_buffer("cos_0").device)
    bias = {} if fc_bias is None else {"fc_bias": fc_bias}
    if config.kind == "glide":
        return Glide(config, target, ids_K=ids_K, own_embed=own_embed, own_lm_head=own_lm_head)
    if config.kind != "eagle":
        kind = Eagle3 if config.kind == "eagle3" else Parallel
        return kind(config, target, ids_K=ids_K, own_embed=own_embed, **bias)
    return Eagle(config, target, ids_K=ids_K, own_embed=own_embed, own_lm_head=own_lm_head, **bias)


def save_head(head: Head, folder: Path) -> None:
    """Write config.json and model.safetensors, which `load_head` reads, and of EAGLE's kinds vLLM and SGLang."""
    kind, vocab_size = head.config.kind, head.config.block.vocab_size
    tensors = {}
    for name, slot in _slots(head):
        name = f"{LAYER[kind]}.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
        tensors[name] = slot.detach().cpu().contiguous()
    if head.ids is not None:
        ids_K = head.get_buffer("ids").cpu()
        tensors["d2t"] = ids_K - torch.arange(len(ids_K))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids_K, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(head.config.raw), indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _kind(raw: Mapping[str, Any], tensors: Mapping[str, tuple[str, Tensor]]) -> Kind:
    """Which head has tensors of these names; ValueError for none that is known. (The names of architectures in public
    folders tell less.)
    """
    if raw.get("architectures") == [ARCHITECTURES["glide"]]:
        return "glide"
    if "fc.weight" not in tensors:
        raise ValueError("there is no tensor fc.weight; give the folder of a trained head")
    if "mask_states" in tensors or raw.get("architectures") == [ARCHITECTURES["parallel"]]:
        return "parallel"
    return "eagle3" if "layers.0.hidden_norm.weight" in tensors else "eagle"


def _draft_ids(tensors: dict[str, tuple[str, Tensor]], config: HeadConfig) -> Tensor | None:
    """The target's ids of the draft tokens, from d2t (what is to be added to a draft token's number) and t2d (which
    tokens have one); None = all. Takes both away. ValueError where they do not fit.
    """
    (_, d2t_K), (_, t2d_V) = (tensors.pop(name, ("", None)) for name in ("d2t", "t2d"))
    num, vocab_size = config.draft_vocab_size, config.block.vocab_size
    if d2t_K is None:
        if num != vocab_size:
            raise ValueError(f"draft_vocab_size is {num} of {vocab_size} and there is no d2t, which says which")
        return None
    if d2t_K.shape != (num,):
        raise ValueError(f"d2t has shape {list(d2t_K.shape)} and draft_vocab_size is {num}")
    ids_K = d2t_K.long() + torch.arange(num)
    if ids_K.min() < 0 or ids_K.max() >= vocab_size or len(ids_K.unique()) < num:
        raise ValueError(f"d2t does not lead to {num} different ones of {vocab_size} tokens")
    known_V = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids_K, True)
    if t2d_V is not None and not torch.equal(t2d_V.bool(), known_V):
        raise ValueError("t2d and d2t name other tokens; both come from one training")
    return ids_K


def _slots(head: Head) -> Iterator[tuple[str, Tensor]]:
    """Where each tensor goes: its name and a view of the parameter."""
    if head.embed is not None:
        yield "embed_tokens.weight", head.embed.weight.data
    if isinstance(head, FeatureHead):
        for part, parameter in head.fc.named_parameters():
            yield f"fc.{part}", parameter.data
    for number, block in enumerate(head.blocks):
        for name, tensor in block_slots(block, head.config.block):
            yield f"layers.{number}.{name}", tensor
    if isinstance(head, Eagle3):
        yield "layers.0.input_layernorm.weight", head.embed_norm.weight.data
        yield "layers.0.hidden_norm.weight", head.state_norm.weight.data
        yield "norm.weight", head.norm.weight.data
    if isinstance(head, Glide):
        for cross in head.block.cross:
            for name, module in (("q_proj", cross.q), ("o_proj", cross.o), ("q_norm", cross.q_norm)):
                if module is not None:
                    yield f"layers.0.cross_attn.{cross.layer}.{name}.weight", module.weight.data
        yield "layers.0.cross_attention_layernorm.weight", head.block.cross_norm.weight.data
        yield "norm.weight", head.norm.weight.data
    if isinstance(head, Parallel):
        yield "mask_embeds", head.mask_embeds.data
        yield "mask_states", head.mask_states.data
    if head.lm_head is not None and head.own_lm_head:
        yield "lm_head.weight", head.lm_head.weight.data
