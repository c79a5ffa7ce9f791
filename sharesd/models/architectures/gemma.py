"""Gemma 2 and 3: four norms a block, scaled embeddings, sliding layers.

Gemma 3 has two ropes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sharesd.models.architecture import (
    BLOCK_NAMES,
    GGUF_ATTENTION_BIAS,
    GGUF_BLOCK_NAMES,
    GGUF_HEAD_NORMS,
    Architecture,
    GGUFLayout,
    llama_like,
    mixed_layers,
)
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.hf_config import HFConfig, context_limit, read_rope, stored_rope

_BLOCK_NAMES = {
    **BLOCK_NAMES,
    "attn_out_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_out_norm": ("post_feedforward_layernorm",),
}
_GGUF_BLOCK_NAMES = {
    **GGUF_BLOCK_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "eos_token_id": 1,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def _read(config: HFConfig, pattern: int, **fields: Any) -> DecoderConfig:
    """`pattern`: one layer in this many has full attention."""
    local = (1,) * config.require("num_hidden_layers") if "rope_parameters" in fields else None
    return llama_like(
        config,
        act_field="hidden_activation",
        layer_types=mixed_layers(
            config,
            window=config.get("sliding_window") or 0,
            slides=lambda i: (i + 1) % pattern != 0,
            sliding_ropes=local,
        ),
        qkv_bias=config.get("attention_bias", False),
        o_bias=config.get("attention_bias", False),
        gemma_norm=True,
        sandwich_norms=True,
        attention_multiplier=config.require("query_pre_attn_scalar") ** -0.5,
        final_logit_softcapping=config.get("final_logit_softcapping") or 0.0,
        embedding_multiplier=config.require("hidden_size") ** 0.5,
        **fields,
    )


def _read_gemma2(config: HFConfig) -> DecoderConfig:
    return _read(config, 2, attn_logit_softcapping=config.get("attn_logit_softcapping") or 0.0)


def _read_gemma3(config: HFConfig) -> DecoderConfig:
    stored = stored_rope(config)
    nested = "full_attention" in stored or "sliding_attention" in stored
    full = (stored.get("full_attention") or {}) if nested else stored
    sliding = (stored.get("sliding_attention") or {}) if nested else {}
    ropes = (read_rope(config, full), read_rope(config, sliding, theta=config.get("rope_local_base_freq", 10_000.0)))
    positions = config.require("max_position_embeddings")  # includes what linear scaling adds
    limits = [positions if rope["rope_type"] == "linear" else context_limit(rope, positions) for rope in ropes]
    pattern = config.get("sliding_window_pattern", 6)
    return _read(config, pattern, rope_parameters=ropes, max_context=min(limits), use_qk_norm=True)


def _gguf_config(layers_of_largest: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that makes the fields which files leave out.

    The largest size, with `layers_of_largest` layers, scales attention by another rule.
    """

    def make(config: Mapping[str, Any]) -> dict[str, Any]:
        mean = config["hidden_size"] // config["num_attention_heads"]
        largest = config["num_hidden_layers"] == layers_of_largest
        return {
            "query_pre_attn_scalar": mean if largest else config["head_dim"],
            "hidden_activation": "gelu_pytorch_tanh",
        }

    return make


ARCHITECTURES = (
    Architecture(
        model_type="gemma2",
        to_decoder_config=_read_gemma2,
        defaults={
            **_DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        block_names=_BLOCK_NAMES,
        gguf=GGUFLayout(
            name="gemma2",
            class_name="Gemma2ForCausalLM",
            block_names=_GGUF_BLOCK_NAMES,
            norms_plus_one=True,
            fields={
                "attention.sliding_window": "sliding_window",
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            ropes=("default", "linear", "yarn"),
            mixes_windows=True,
            biases=GGUF_ATTENTION_BIAS,
            extra_config=_gguf_config(layers_of_largest=46),
            sentencepiece="no_prefix",
        ),
    ),
    Architecture(
        model_type="gemma3_text",
        to_decoder_config=_read_gemma3,
        defaults={
            **_DEFAULTS,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
        },
        multimodal_type="gemma3",
        block_names=_BLOCK_NAMES,
        gguf=GGUFLayout(
            name="gemma3",
            class_name="Gemma3ForCausalLM",
            block_names={**_GGUF_BLOCK_NAMES, **GGUF_HEAD_NORMS},
            norms_plus_one=True,
            fields={
                "attention.sliding_window": "sliding_window",
                "rope.freq_base_swa": "rope_local_base_freq",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            ropes=("default", "linear"),
            mixes_windows=True,
            biases=GGUF_ATTENTION_BIAS,
            extra_config=_gguf_config(layers_of_largest=62),
            sentencepiece="no_prefix",
        ),
    ),
)
