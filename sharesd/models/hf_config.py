"""Fields of a Hugging Face config, checked before allocations; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sharesd.config import MIN_CONTEXT
from sharesd.devices.host_memory import free_memory
from sharesd.models.decoder_config import DecoderConfig, UnsupportedArchitecture

MAX_LAYERS, MAX_SIZE = 10_000, 1 << 40
"""Bounds of layers and of other whole numbers."""
MAX_CLAIM = 16
"""Weights that a config may ask for per stored one.

The shapes of tensors show smaller mistakes.
"""
LARGE_TABLE = 1 << 30
"""Bytes of rope tables from which free memory is looked up."""


def _whole(low: int, high: int = MAX_SIZE) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1e30 < value < 1e30  # false for NaN


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _all_are(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, int) and value in (0, 1)


def _is_id(value: Any) -> bool:
    return _whole(-1, 2**31 - 1)(value) or _all_are(_whole(-1, 2**31 - 1))(value)


_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "a whole number above 0",
        _whole(1),
        "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings original_max_position_embeddings no_rope_layer_interval sliding_window_pattern "
        "draft_vocab_size target_hidden_size num_experts_per_tok moe_intermediate_size decoder_sparse_step "
        "shared_expert_intermediate_size "
        "n_shared_experts block_ff_dim block_multiple_of conv_L_cache linear_num_key_heads linear_num_value_heads "
        "linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim full_attention_interval",
    ),
    (f"a whole number from 1 to {MAX_LAYERS}", _whole(1, MAX_LAYERS), "num_hidden_layers draft_length"),
    (
        f"a whole number from 0 to {MAX_LAYERS}",
        _whole(0, MAX_LAYERS),
        "num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers max_window_layers first_k_dense_replace "
        "num_dense_layers",
    ),
    ("a whole number", _whole(0), "sliding_window num_experts num_local_experts n_routed_experts"),
    ("a list of whole numbers", _all_are(_whole(0)), "mlp_only_layers full_attn_idxs"),
    (
        "a number above 0",
        _is_positive,
        "rope_theta rope_local_base_freq query_pre_attn_scalar partial_rotary_factor factor attention_factor "
        "low_freq_factor high_freq_factor beta_fast beta_slow routed_scaling_factor block_ffn_dim_multiplier",
    ),
    (
        "a number, 0 or more",
        lambda value: _is_number(value) and value >= 0,
        "rms_norm_eps norm_eps attn_logit_softcapping final_logit_softcapping mscale mscale_all_dim "
        "llama_4_scaling_beta",
    ),
    (
        "true or false",
        _is_flag,
        "attention_bias mlp_bias tie_word_embeddings use_sliding_window truncate norm_topk_prob use_qk_norm "
        "conv_bias block_auto_adjust_ff_dim tie_embedding use_expert_bias linear_value_heads_tiled",
    ),
    ("a text", _is_text, "model_type hidden_act hidden_activation rope_type type"),
    ("a list of texts", _all_are(_is_text), "layer_types"),
    ("a list of 0 and 1", _all_are(_is_flag), "no_rope_layers"),
    ("a list of numbers above 0", _all_are(_is_positive), "short_factor long_factor"),
    ("a token id, or a list of them", _is_id, "eos_token_id"),
)
_CHECKS = {name: (kind, check) for kind, check, names in _KINDS for name in names.split()}
_SECTIONS = ("rope_scaling", "rope_parameters")


def check_fields(model_type: str, fields: Mapping[str, Any], section: str = "") -> None:
    """Raise ValueError for a field of another type or size.

    Fields of null and unknown ones are skipped. Sections about rope are checked, too.
    """
    for name, value in fields.items():
        if value is None:
            continue
        kind, check = _CHECKS.get(name, ("", None))
        if check is not None and not check(value):
            raise wrong_value(model_type, section + name, value, kind)
        if section or name in _SECTIONS:
            if isinstance(value, Mapping):
                check_fields(model_type, value, f"{section}{name}.")
            elif name in _SECTIONS and value:
                raise wrong_value(model_type, name, value, "an object")


def wrong_value(model_type: str, name: str, value: Any, kind: str) -> ValueError:
    """Return the error for a field of another kind."""
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
    return ValueError(
        f"config.json of this {model_type} checkpoint has {name!r} = {shown}, which is not {kind}; "
        "download the checkpoint again, or correct the field"
    )


def check_sizes(config: DecoderConfig, num_stored: int) -> None:
    """Raise ValueError if weights or positions exceed all that is there.

    Those are the stored weights, `num_stored` or fewer, and the free memory.
    """
    c = config
    heads = 2 * c.num_attention_heads + 2 * c.num_key_value_heads
    inner = [
        c.experts.num_experts * c.experts.intermediate_size if kind.has_experts and c.experts else c.intermediate_size
        for kind in c.layer_types
    ]
    num_asked = c.hidden_size * (c.vocab_size + c.num_hidden_layers * heads * c.head_dim + 3 * sum(inner))
    _check_asked(num_asked, num_stored, c.num_hidden_layers, c.hidden_size, c.vocab_size)
    if c.max_context < MIN_CONTEXT:
        raise ValueError(
            f"config.json allows {c.max_context} positions, and at least {MIN_CONTEXT} are needed; correct "
            "max_position_embeddings and the factors of its rope"
        )
    table = 4 * 4 * c.max_context * (c.head_dim // 2) * len(c.rope_parameters)  # angles, cosines, sines, and one cast
    if table > LARGE_TABLE and table > free_memory():
        raise ValueError(
            f"config.json allows {c.max_context:,} positions, whose rope tables need {table / 1e9:,.0f} GB of "
            "memory; correct max_position_embeddings"
        )


def check_transformers_sizes(config: Any, num_stored: int) -> None:
    """Raise ValueError if a config of transformers asks for too many weights.

    Counted are an embedding, and a square of the hidden size for each layer.
    """
    names = ("num_hidden_layers", "hidden_size", "vocab_size")
    layers, hidden, vocab = (value if isinstance(value := getattr(config, name, 0), int) else 0 for name in names)
    _check_asked(vocab * hidden + layers * hidden**2, num_stored, layers, hidden, vocab)


def _check_asked(num_asked: int, num_stored: int, layers: int, hidden: int, vocab: int) -> None:
    if num_asked > MAX_CLAIM * num_stored or layers > MAX_LAYERS:
        raise ValueError(
            f"config.json asks for {num_asked:,} weights ({layers} layers, hidden size {hidden}, {vocab} tokens), and "
            f"at most {num_stored:,} are stored; download the checkpoint again"
        )


NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Fields whose null disables a feature; in others null is the default."""

CHANGING: dict[str, Any] = {
    "embedding_multiplier": 1,
    "attention_multiplier": None,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
    "scale_emb": 1,
    "scale_depth": None,
    "mup_width_scale": 1,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "clip_qkv": None,
    "alibi": False,
    "use_alibi": False,
    "parallel_attn": False,
    "use_parallel_residual": False,
    "use_bidirectional_attention": False,
    "attn_temperature_tuning": False,
    "attention_chunk_size": None,
    "no_rope_layers": None,
    "num_kv_shared_layers": 0,
}
"""Fields that change results in some families -> value without effect.

With another value, a family that does not read the field refuses it.
"""
CHANGING_ROPE: dict[str, Any] = {
    "alpha": None,
    "attn_factor": 1,
    "extrapolation_factor": 1,
    "llama_4_scaling_beta": 0,
    "short_mscale": None,
    "long_mscale": None,
}
"""The same, of the section about rope."""


class HFConfig:
    """Fields of a Hugging Face config, over the defaults of its family."""

    def __init__(self, model_type: str, defaults: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        self.model_type = model_type
        self._read: set[str] = set()
        self._fields = {**defaults, **{k: v for k, v in fields.items() if v is not None or k in NULLABLE}}

    def __contains__(self, key: str) -> bool:
        self._read.add(key)
        return key in self._fields

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field; `default` if the config leaves it out."""
        self._read.add(key)
        return self._fields.get(key, default)

    def get_rope(self, key: str) -> Any:
        """Return a field of the section about rope; None if the config leaves it out."""
        self._read.add(key)
        return stored_rope(self).get(key)

    def require(self, key: str) -> Any:
        """Return a field; ValueError if the config leaves it out."""
        if key not in self:
            raise ValueError(f"config.json of this {self.model_type} checkpoint has no {key!r}; download it again")
        return self._fields[key]

    def unsupported(self, feature: str) -> UnsupportedArchitecture:
        """Error that names a feature which the native decoder lacks."""
        return UnsupportedArchitecture(
            f"architecture {self.model_type!r} with {feature} is not supported by the native decoder"
        )

    def refuse_unread(self) -> None:
        """Raise ValueError for a field that changes results, but was not read."""
        unread = {name: value for name, value in self._fields.items() if name in CHANGING and name not in self._read}
        ropes = [
            (f"{name}.", {key: value for key, value in (self._fields.get(name) or {}).items() if key not in self._read})
            for name in ("rope_scaling", "rope_parameters")
        ]
        for known, section, fields in ((CHANGING, "", unread), *((CHANGING_ROPE, *rope) for rope in ropes)):
            for name, value in fields.items():
                if name in known and value not in (None, False, 0, [], known[name]):
                    raise ValueError(
                        f"config.json of this {self.model_type} checkpoint has {name!r} = {value!r}, which this "
                        "architecture does not compute; give the checkpoint under its own model_type, or load it "
                        f"without this key: --ignore-key {section}{name}"
                    )


ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor",),
}
"""Scaling rule -> parameters that it requires."""


def stored_rope(config: HFConfig) -> Mapping[str, Any]:
    """Return the config's section about rope; empty if there is none."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def read_rope(
    config: HFConfig,
    stored: Mapping[str, Any] | None = None,
    *,
    theta: float | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Mapping[str, Any]:
    """Return rope parameters in the naming of transformers 5.

    `stored`: a section instead of the config's. `theta`: if that has none, instead of the config's. `aliases`: further
    names of a rule -> its name in ROPE_TYPES.
    """
    stored = stored_rope(config) if stored is None else stored
    theta = config.get("rope_theta", 10_000.0) if theta is None else theta
    rope: dict[str, Any] = {"rope_theta": theta} | {k: v for k, v in stored.items() if v is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope["rope_type"] = ({"su": "longrope"} | dict(aliases or {})).get(kind, kind)
    if "partial_rotary_factor" in config:
        rope.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    if "original_max_position_embeddings" in config:
        rope["original_max_position_embeddings"] = config.get("original_max_position_embeddings")
    rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return rope


def context_limit(rope: Mapping[str, Any], max_position_embeddings: int) -> int:
    """Return the number of positions for which `sharesd.models.rope` has the checkpoint's frequencies."""
    if rope["rope_type"] == "longrope":  # beyond, other factors apply to all positions, also to those already cached
        return min(max_position_embeddings, rope["original_max_position_embeddings"])
    if rope["rope_type"] == "yarn" and rope.get("factor"):
        return max(max_position_embeddings, int(rope["original_max_position_embeddings"] * rope["factor"]))
    if rope["rope_type"] == "linear":
        return int(max_position_embeddings * rope["factor"])
    return max_position_embeddings
