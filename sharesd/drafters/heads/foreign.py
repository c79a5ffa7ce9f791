"""Known formats and switches of heads that are refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from sharesd.drafters.heads.config import SWITCHES


class HeadFormat(NamedTuple):
    """A published format of heads, and what identifies it in a folder."""

    name: str
    types: tuple[str, ...] = ()
    """Parts of `speculators_model_type`, `model_type`, `projector_type` or a name in `architectures`."""
    keys: tuple[str, ...] = ()
    """Keys of config.json, each of which identifies it."""
    tensors: tuple[str, ...] = ()
    """Parts of tensor names, each of which identifies it."""


FORMATS = (
    HeadFormat("Medusa", ("medusa",), ("medusa_num_heads", "medusa_num_layers"), ("medusa_head.", "0.0.linear.weight")),
    HeadFormat("Hydra", ("hydra",), ("hydra_num_heads", "hydra_head_arch")),
    HeadFormat("MLP speculator", ("mlpspeculator", "mlp_speculator"), ("n_predict",)),
    HeadFormat("Domino", ("domino",)),
    HeadFormat("XPress", ("xpress",), (), ("refiner_head.",)),
    HeadFormat("DSpark", ("dspark",), ("markov_rank", "markov_head_type"), ("markov_head.",)),
    HeadFormat(
        "DFlash 2",
        ("dflash2",),
        ("selector_rank", "conv_kernel_size"),
        ("candidate_selector.", ".attention_conv.", ".mlp_conv."),
    ),
    HeadFormat("DFlash", ("dflash",), ("dflash_config",)),
    HeadFormat("P-EAGLE", ("peagle",), ("ptd_token_id",), ("mask_hidden",)),
    HeadFormat("Gemma 4 assistant", ("assistant",), ("backbone_hidden_size",), ("pre_projection.", "post_projection.")),
    HeadFormat("MTP", ("mtp",), ("mtp_hybrid_override_pattern",), ("mtp_layers.", "mtp.", ".eh_proj.")),
    HeadFormat("EAGLE with latent attention (MLA)", ("deepseek",), ("kv_lora_rank",), (".kv_a_proj_with_mqa.",)),
)
"""Formats, the narrower before the wider."""

REFUSED = {
    "parallel_drafting": "P-EAGLE",
    "layernorms": "EAGLE with layer norms",
}
"""Keys of config.json that are refused if set -> format."""
SAFE: tuple[str, ...] = (
    "use_cache",
    *SWITCHES,
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
_REMEDY = "give a head in a layout of EAGLE, EAGLE-2, EAGLE-3 or EAGLE-3.1 without it, or use a mode without a head"


def refuse_foreign(raw: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Raise ValueError that names a format or switch which is not supported.

    `raw`: config.json; `tensors`: names of the stored tensors.
    """
    parts = [raw, *(part for name in SECTIONS if isinstance(part := raw.get(name), Mapping))]
    for name, known in REFUSED.items():
        for part in parts:
            if part.get(name):
                raise ValueError(f"{name} is {part[name]!r} in its config.json ({known}), not supported; {_REMEDY}")
    for each in FORMATS:
        reason = _reason(each, parts, tensors)
        if reason:
            raise ValueError(f"{reason}: a head of the format {each.name}, not supported; {_REMEDY}")
    for part in parts:
        for name, value in part.items():
            if value is True and name not in SAFE and not HINTS.isdisjoint(name.split("_")):
                raise ValueError(f"{name} is True in its config.json, not supported; {_REMEDY}")


def _reason(each: HeadFormat, parts: Collection[Mapping[str, Any]], tensors: Collection[str]) -> str:
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
