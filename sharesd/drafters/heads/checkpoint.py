"""Checkpoint folders of trained heads, in the layouts of serving engines; formats of heads that are refused by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharesd.drafters import registry
from sharesd.drafters.heads.config import HeadConfig, Kind, head_class
from sharesd.drafters.heads.head import Head
from sharesd.models import checkpoint
from sharesd.models.config_checks import check_sizes
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import DecoderConfig
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
        config = HeadConfig.of(raw, _kind(raw, tensors), target.config)
        check_sizes(config.block, sum(file.stat().st_size for file in files))
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


def new_head(
    config: HeadConfig,
    target: Decoder,
    *,
    ids_K: Tensor | None = None,
    own_embed: bool = False,
    own_lm_head: bool = False,
    fc_bias: bool | None = None,
) -> Head:
    """Return a head without values; ignore options its kind lacks."""
    if ids_K is not None:
        ids_K = ids_K.to(target.get_buffer("cos_0").device)
    cls = head_class(config.kind)
    given = {"own_lm_head": own_lm_head, **({} if fc_bias is None else {"fc_bias": fc_bias})}
    options = {name: value for name, value in given.items() if name in cls.OPTIONS}
    head: Head = cls(config, target, ids_K=ids_K, own_embed=own_embed, **options)
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
    if "fc.weight" not in tensors:
        raise ValueError("the tensor fc.weight is missing; give the folder of a trained head")
    return next((each.layout for each in reversed(layouts) if each.marks & tensors.keys()), layouts[0].layout)


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


class Format(NamedTuple):
    """A published format of heads, and what identifies it in a folder."""

    name: str
    types: tuple[str, ...] = ()
    """Parts of `speculators_model_type`, `model_type`, `projector_type` or a name in `architectures`."""
    keys: tuple[str, ...] = ()
    """Keys of config.json, each of which identifies it."""
    tensors: tuple[str, ...] = ()
    """Parts of tensor names, each of which identifies it."""


FORMATS = (
    Format("Medusa", ("medusa",), ("medusa_num_heads", "medusa_num_layers"), ("medusa_head.", "0.0.linear.weight")),
    Format("Hydra", ("hydra",), ("hydra_num_heads", "hydra_head_arch")),
    Format("MLP speculator", ("mlpspeculator", "mlp_speculator"), ("n_predict",)),
    Format("Domino", ("domino",)),
    Format("XPress", ("xpress",), (), ("refiner_head.",)),
    Format("DSpark", ("dspark",), ("markov_rank", "markov_head_type"), ("markov_head.",)),
    Format(
        "DFlash 2",
        ("dflash2",),
        ("selector_rank", "conv_kernel_size"),
        ("candidate_selector.", ".attention_conv.", ".mlp_conv."),
    ),
    Format("DFlash", ("dflash",), ("dflash_config",)),
    Format("P-EAGLE", ("peagle",), ("ptd_token_id",), ("mask_hidden",)),
    Format("Gemma 4 assistant", ("assistant",), ("backbone_hidden_size",), ("pre_projection.", "post_projection.")),
    Format("MTP", ("mtp",), ("mtp_hybrid_override_pattern",), ("mtp_layers.", "mtp.", ".eh_proj.")),
    Format("EAGLE with latent attention (MLA)", ("deepseek",), ("kv_lora_rank",), (".kv_a_proj_with_mqa.",)),
    Format("EAGLE-3.1", (), ("fc_norm",), ("fc_norm.",)),
)
"""Formats, the narrower before the wider."""

SWITCHES = {
    "norm_output": "EAGLE-3.1",
    "norm_before_fc": "EAGLE-3 with a norm before fc",
    "fc_norm": "EAGLE-3.1",
    "parallel_drafting": "P-EAGLE",
    "layernorms": "EAGLE with layer norms",
}
"""Keys of config.json that are refused if set -> format."""
SAFE: tuple[str, ...] = (
    "use_cache",
    "norm_before_residual",
    "tie_word_embeddings",
    "embed_requires_grad",
    "use_sliding_window",
)
SAFE += ("use_aux_hidden_state", "attention_bias", "mlp_bias", "has_no_defaults_at_init", "fc_bias", "use_qk_norm")
"""Keys with `true` that are honoured, or without effect."""
HINTS = {"norm", "fc", "residual", "aux", "draft", "parallel", "causal", "mask", "anchor", "feedback", "sliding"}
"""Words in names of further keys that are refused with `true`."""

SECTIONS = ("eagle_config", "transformer_layer_config", "speculators_config", "dflash_config")
"""Sections of config.json that are searched."""
_REMEDY = "give a head in a layout of EAGLE, EAGLE-2 or EAGLE-3 without it, or use a mode without a head"


def refuse_foreign(raw: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Raise ValueError that names a format or switch which is not supported.

    `raw`: config.json; `tensors`: names of the stored tensors.
    """
    parts = [raw, *(part for name in SECTIONS if isinstance(part := raw.get(name), Mapping))]
    for name, known in SWITCHES.items():
        for part in parts:
            if part.get(name):
                raise ValueError(f"{name} is {part[name]!r} in its config.json ({known}), not supported; {_REMEDY}")
    for each in FORMATS:
        reason = _reason(each, parts, tensors)
        if reason:
            raise ValueError(f"{reason}: a head of the format {each.name}, not supported; {_REMEDY}")
    for part in parts:
        if part.get("use_aux_hidden_state") is False:
            raise ValueError(f"use_aux_hidden_state is False in its config.json, not supported; {_REMEDY}")
        for name, value in part.items():
            if value is True and name not in SAFE and not HINTS.isdisjoint(name.split("_")):
                raise ValueError(f"{name} is True in its config.json, not supported; {_REMEDY}")
        sliding = next((kind for kind in part.get("layer_types") or () if kind != "full_attention"), None)
        if sliding is not None:
            raise ValueError(f"layer_types has {sliding!r} in its config.json, not supported; {_REMEDY}")


def _reason(each: Format, parts: Collection[Mapping[str, Any]], tensors: Collection[str]) -> str:
    """Return what identifies the format, or nothing."""
    for part in parts:
        names = [part.get(name) for name in ("speculators_model_type", "model_type", "projector_type", "algorithm")]
        named = [*names, *(part.get("architectures") or ())]
        for name in named:
            if isinstance(name, str) and any(kind in name.lower().replace("-", "") for kind in each.types):
                return name
        for key in each.keys:
            if part.get(key):
                return f"its config.json has {key}"
    found = next((name for name in tensors for mark in each.tensors if mark in f".{name}" or mark in name), None)
    return "" if found is None else f"it has a tensor {found}"
