"""Metadata keys of .gguf files, and the error for unknown ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

WITHOUT_EFFECT = frozenset({"vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned"})
"""Keys below the architecture that change no result."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.sliding_window_pattern": (0, 1),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_group_count": (0,),
    "expert_group_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}
"""Keys below the architecture -> values that switch nothing on."""

TOKENIZER_USED = frozenset(
    f"tokenizer.ggml.{key}"
    for key in (
        *("model", "pre", "tokens", "token_type", "scores", "merges"),
        *("add_bos_token", "add_eos_token", "add_space_prefix"),
        *(f"{role}_token_id" for role in ("bos", "eos", "eot", "eom", "unknown", "padding")),
        *(f"fim_{role}_token_id" for role in ("pad", "rep", "sep")),
    )
) | {"tokenizer.chat_template"}
"""Keys of the tokenizer that the conversion reads, besides `tokenizer.chat_template.NAME`."""

TOKENIZER_WITHOUT_EFFECT = frozenset(
    f"tokenizer.ggml.{key}"
    for key in (
        "token_type_count",
        *(f"{role}_token_id" for role in ("seperator", "separator", "cls", "mask", "prefix", "suffix", "middle")),
        *(f"fim_{role}_token_id" for role in ("pre", "suf", "mid")),
    )
) | {"tokenizer.chat_templates", "tokenizer.huggingface.json", "tokenizer.rwkv.world"}
"""Keys of the tokenizer that change no result.

They name tokens and templates, or hold copies for other programs.
"""

TOKENIZER_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
    "tokenizer.ggml.precompiled_charsmap": ([],),
    "tokenizer.ggml.suppress_tokens": ([],),
    "tokenizer.ggml.normalizer.lowercase": (False,),
    "tokenizer.ggml.normalizer.strip_accents": (False,),
}
"""Keys of the tokenizer -> values that switch nothing on."""

CHAT_TEMPLATES = "tokenizer.chat_template."
"""Beginning of the keys of named chat templates."""


class UnknownKey(ValueError):
    """Error for a key or tensor whose meaning is not known."""


def unknown_key(key: str, value: Any) -> UnknownKey:
    """Return the error that names a key and the way out."""
    shown = f"[{len(value)} values]" if isinstance(value, list) else repr(value)
    return UnknownKey(
        f"key {key!r} = {shown[:60]} is not supported here and may change the answers; "
        f"give another file, or load it without this key: --ignore-key {key}"
    )


def unknown_tensor(name: str, why: str = "has no place in this architecture") -> UnknownKey:
    """Return the error that names a tensor and the way out."""
    return UnknownKey(
        f"tensor {name!r} {why} and may change the answers; "
        f"give another file, or load it without this tensor: --ignore-key {name}"
    )


def is_neutral(key: str, value: Any, neutral: Mapping[str, tuple[Any, ...]]) -> bool:
    """Return True if a key's value (each of a list) is neutral."""
    values = value if isinstance(value, list) and value else [value]
    return key in neutral and all(each in neutral[key] for each in values)


def is_close(value: Any, wanted: float) -> bool:
    """Return True for a number that is equal in float32."""
    return isinstance(value, int | float) and math.isclose(value, wanted, rel_tol=1e-5)


def check_tokenizer_keys(metadata: Mapping[str, Any]) -> None:
    """Raise UnknownKey for a key of the tokenizer that is not known."""
    for key, value in metadata.items():
        if not key.startswith("tokenizer.") or key in TOKENIZER_USED or key in TOKENIZER_WITHOUT_EFFECT:
            continue
        name = key.removeprefix(CHAT_TEMPLATES)
        if name != key and name.replace("_", "").replace("-", "").isalnum() and isinstance(value, str):
            continue
        if not is_neutral(key, value, TOKENIZER_NEUTRAL):
            raise unknown_key(key, value)
