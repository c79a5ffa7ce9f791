"""Qwen2, Qwen2.5 and Qwen3: upper layers may slide.

Qwen2 has biases, Qwen3 norms of heads.
"""

from __future__ import annotations

from sharesd.models.architecture import (
    GGUF_ATTENTION_BIAS,
    GGUF_BLOCK_NAMES,
    GGUF_HEAD_NORMS,
    Architecture,
    GGUFLayout,
    llama_like,
    mixed_layers,
)
from sharesd.models.decoder_config import DecoderConfig, LayerType
from sharesd.models.hf_config import HFConfig


def _layers(config: HFConfig) -> tuple[LayerType, ...]:
    window = (config.get("sliding_window") or 0) if config.get("use_sliding_window", False) else 0
    return mixed_layers(config, window=window, slides=lambda i: i >= config.get("max_window_layers", 28))


def _read_qwen2(config: HFConfig) -> DecoderConfig:
    return llama_like(config, layer_types=_layers(config), qkv_bias=True)


def _read_qwen3(config: HFConfig) -> DecoderConfig:
    bias = config.get("attention_bias", False)
    return llama_like(config, layer_types=_layers(config), qkv_bias=bias, o_bias=bias, use_qk_norm=True)


ARCHITECTURES = (
    Architecture(
        model_type="qwen2",
        to_decoder_config=_read_qwen2,
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096},
        gguf=GGUFLayout(name="qwen2", class_name="Qwen2ForCausalLM"),
    ),
    Architecture(
        model_type="qwen3",
        to_decoder_config=_read_qwen3,
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
        gguf=GGUFLayout(
            name="qwen3",
            class_name="Qwen3ForCausalLM",
            block_names={**GGUF_BLOCK_NAMES, **GGUF_HEAD_NORMS},
            biases=GGUF_ATTENTION_BIAS,
        ),
    ),
)
