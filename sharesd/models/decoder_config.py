"""What a checkpoint's config.json says, in the terms of the native decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sharesd.models import rope as rope_rules
from sharesd.models.checkpoint import token_ids

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma2", "gemma3_text", "gemma3")
"""Values of `model_type` that the native decoder serves."""

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")

# Values that config.json may leave out because they are the family's defaults.
_GEMMA = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "eos_token_id": 1}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {"max_position_embeddings": 131072, "eos_token_id": 2, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
    "smollm3": {"max_position_embeddings": 32768, "tie_word_embeddings": True, "rope_theta": 2e6},
    "phi3": {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "gemma2": _GEMMA
    | {
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA
    | {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1e6,
    },
}


class Unsupported(ValueError):
    """The native decoder cannot serve this checkpoint exactly; the message names architecture and feature."""


class LayerKind(NamedTuple):
    """What differs between the layers of one model."""

    window: int
    """Only the last so many tokens are seen; 0 = all."""
    rope: int
    """Index into `DecoderConfig.ropes`; -1 = no positions (NoPE)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes and switches of one native decoder."""

    architecture: str
    """The checkpoint's `model_type`."""
    vocab_size: int
    """Rows of the embedding and of the head, padding included."""
    hidden_size: int
    """Size of the residual stream."""
    mlp_size: int
    """Size between gate/up and down."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads; divides num_heads."""
    head_dim: int
    """Size of one head."""
    layers: tuple[LayerKind, ...]
    """One entry for each block."""
    ropes: tuple[Mapping[str, Any], ...]
    """Rope parameters, as `sharesd.models.rope` reads them."""
    max_positions: int
    """`max_position_embeddings` of the checkpoint."""
    max_context: int
    """Tokens that the positions allow."""
    norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    activation: str = "silu"
    """Of the gate: one of ACTIVATIONS."""
    tied: bool = False
    """The head is the embedding."""
    qkv_bias: bool = False
    """Q, K and V have biases."""
    o_bias: bool = False
    """The attention output has a bias."""
    mlp_bias: bool = False
    """Gate, up and down have biases."""
    qk_norm: bool = False
    """Queries and keys are normalised per head, before the rotation (Qwen3, Gemma 3)."""
    gemma_norm: bool = False
    """Norm weights are stored minus one, and multiply in float32 before the cast."""
    sandwich_norms: bool = False
    """Attention and MLP outputs are normalised too (Gemma 2 and 3)."""
    attn_scale: float
    """Factor on attention scores."""
    attn_softcap: float = 0.0
    """Attention scores are squashed to this; 0 = not."""
    final_softcap: float = 0.0
    """Logits are squashed to this; 0 = not."""
    embed_scale: float = 1.0
    """Factor on embeddings."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a text, according to config.json."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a config.json, in the naming of transformers 4 or 5.

        Raises Unsupported for whatever the native decoder does not do exactly, ValueError for missing fields.
        """
        if config.get("model_type") == "gemma3":  # with a vision tower, which text does not need
            config = {k: config[k] for k in ("tie_word_embeddings", "eos_token_id") if k in config} | {
                "model_type": "gemma3_text",
                **config["text_config"],
            }
        family = config.get("model_type")
        if family not in _DEFAULTS:
            raise Unsupported(f"architecture {family!r} has no native decoder; it serves {', '.join(FAMILIES)}")
        return _parse(family, _DEFAULTS[family] | {k: v for k, v in config.items() if v is not None or k in _NULLABLE})


# Where null is a statement of its own and not a missing value.
_NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")


def _parse(family: str, config: Mapping[str, Any]) -> DecoderConfig:
    def need(key: str) -> int:
        if key not in config:
            raise ValueError(f"config.json of this {family} checkpoint has no {key!r}")
        return config[key]

    def refuse(feature: str) -> Unsupported:
        return Unsupported(f"architecture {family!r} with {feature} is not supported by the native decoder")

    gemma = family in ("gemma2", "gemma3_text")
    heads, hidden = need("num_attention_heads"), need("hidden_size")
    head_dim = config.get("head_dim") or hidden // heads
    activation = config.get("hidden_activation" if gemma else "hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise refuse(f"activation {activation!r}")
    if config.get("use_bidirectional_attention"):
        raise refuse("bidirectional attention")
    ropes = _ropes(family, config)
    for rope in ropes:
        if rope["rope_type"] not in rope_rules.ROPE_TYPES:
            raise refuse(f"rope type {rope['rope_type']!r}")
        for key in rope_rules.ROPE_TYPES[rope["rope_type"]]:
            if key not in rope:
                raise ValueError(
                    f"config.json of this {family} checkpoint has rope {rope['rope_type']!r} without {key!r}"
                )
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and family != "phi3":
            raise refuse(f"partial_rotary_factor {rope['partial_rotary_factor']}")
    max_positions = need("max_position_embeddings")
    max_context = min(rope_rules.context_limit(rope, max_positions) for rope in ropes)
    if family != "gemma3_text" and ropes[0]["rope_type"] == "linear":  # Gemma 3 counts the stretched positions
        max_context = int(max_context * ropes[0]["factor"])
    scalar = config["query_pre_attn_scalar"] if gemma else head_dim
    all_bias = family in ("llama", "qwen3", "smollm3", "gemma2", "gemma3_text") and config.get("attention_bias", False)
    return DecoderConfig(
        architecture=family,
        vocab_size=need("vocab_size"),
        hidden_size=hidden,
        mlp_size=need("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", heads),
        head_dim=head_dim,
        layers=_layers(family, config, need("num_hidden_layers"), refuse),
        ropes=ropes,
        max_positions=max_positions,
        max_context=max_context,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        activation=activation,
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or all_bias,
        o_bias=all_bias,
        mlp_bias=family in ("llama", "smollm3") and config.get("mlp_bias", False),
        qk_norm=family in ("qwen3", "gemma3_text"),
        gemma_norm=gemma,
        sandwich_norms=gemma,
        attn_scale=scalar**-0.5,
        attn_softcap=(config.get("attn_logit_softcapping") or 0.0) if family == "gemma2" else 0.0,
        final_softcap=(config.get("final_logit_softcapping") or 0.0) if gemma else 0.0,
        embed_scale=hidden**0.5 if gemma else 1.0,
        eos_ids=token_ids(config.get("eos_token_id")),
    )


def _ropes(family: str, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Rope parameters in the newer naming; for Gemma 3 those of global and of sliding layers."""
    stored = config.get("rope_scaling") or config.get("rope_parameters") or {}

    def normal(params: Mapping[str, Any], theta: float) -> Mapping[str, Any]:
        rope = {"rope_theta": theta} | {k: v for k, v in params.items() if v is not None}
        rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
        if rope["rope_type"] == "su" or (family == "phi3" and rope["rope_type"] == "yarn"):
            rope["rope_type"] = "longrope"  # earlier names of the same rule
        if "partial_rotary_factor" in config:
            rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
        if "original_max_position_embeddings" in config:
            rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        return rope

    theta = config.get("rope_theta", 10_000.0)
    if family != "gemma3_text":
        return (normal(stored, theta),)
    nested = "full_attention" in stored or "sliding_attention" in stored
    full = (stored.get("full_attention") or {}) if nested else stored
    sliding = (stored.get("sliding_attention") or {}) if nested else {}
    return (normal(full, theta), normal(sliding, config.get("rope_local_base_freq", 10_000.0)))


def _layers(
    family: str, config: Mapping[str, Any], num_layers: int, refuse: Callable[[str], Unsupported]
) -> tuple[LayerKind, ...]:
    """Window and rope of every layer."""
    window = config.get("sliding_window") or 0
    if family == "llama":
        return (LayerKind(0, 0),) * num_layers
    if family in ("mistral", "phi3"):
        return (LayerKind(window, 0),) * num_layers
    if family in ("qwen2", "qwen3", "smollm3") and not config.get("use_sliding_window", False):
        window = 0
    every = config.get("no_rope_layer_interval", 4)
    use_rope = [(i + 1) % every != 0 for i in range(num_layers)] if family == "smollm3" else [True] * num_layers
    if family == "smollm3" and "no_rope_layers" in config:
        use_rope = [bool(x) for x in config["no_rope_layers"]]
    types = config.get("layer_types")
    if types is None:
        pattern = {"gemma2": 2, "gemma3_text": config.get("sliding_window_pattern", 6)}.get(family)
        if pattern:
            sliding = [(i + 1) % pattern != 0 for i in range(num_layers)]
        elif family == "smollm3":
            sliding = [not rope for rope in use_rope]
        else:
            sliding = [i >= config.get("max_window_layers", 28) for i in range(num_layers)]
        types = ["sliding_attention" if slides and window else "full_attention" for slides in sliding]
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise refuse(f"layer type {kind!r}")
    if "sliding_attention" in types and not window:
        raise refuse("sliding_attention layers but no sliding_window")
    local = 1 if family == "gemma3_text" else 0
    return tuple(
        LayerKind(window, local if rope else -1) if kind == "sliding_attention" else LayerKind(0, 0 if rope else -1)
        for kind, rope in zip(types[:num_layers], use_rope, strict=False)
    )
