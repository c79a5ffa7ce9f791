"""Qwen3-MoE: Qwen3, with a mixture of experts for the MLP of most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharesd.models.architecture import (
    BLOCK_NAMES,
    EXPERT_NAMES,
    GGUF_ATTENTION,
    GGUF_ATTENTION_BIAS,
    GGUF_EXPERT_FIELDS,
    GGUF_EXPERT_NAMES,
    GGUF_HEAD_NORMS,
    MERGED_EXPERTS,
    Architecture,
    GGUFLayout,
    llama_like,
    read_experts,
)
from sharesd.models.decoder_config import DecoderConfig, LayerType
from sharesd.models.hf_config import HFConfig


def _read(config: HFConfig) -> DecoderConfig:
    bias, norm = config.get("attention_bias", False), config.get("norm_topk_prob", False)
    experts = read_experts(config, config.require("moe_intermediate_size"), norm_topk_prob=norm)
    window = (config.get("sliding_window") or 0) if config.get("use_sliding_window", False) else 0
    dense, step = config.get("mlp_only_layers", ()), config.get("decoder_sparse_step", 1)
    return llama_like(
        config,
        layer_types=tuple(
            LayerType(window, 0, experts is not None and i not in dense and (i + 1) % step == 0)
            for i in range(config.require("num_hidden_layers"))
        ),
        qkv_bias=bias,
        o_bias=bias,
        use_qk_norm=True,
        experts=experts,
    )


def _gguf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "norm_topk_prob": config.get("norm_topk_prob", True)}


ARCHITECTURES = (
    Architecture(
        model_type="qwen3_moe",
        to_decoder_config=_read,
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 4},
        block_names={**BLOCK_NAMES, **EXPERT_NAMES},
        merged_experts=MERGED_EXPERTS,
        gguf=GGUFLayout(
            name="qwen3moe",
            class_name="Qwen3MoeForCausalLM",
            block_names={
                **GGUF_ATTENTION,
                "attn_output": "self_attn.o_proj",
                "attn_norm": "input_layernorm",
                "ffn_norm": "post_attention_layernorm",
                **GGUF_HEAD_NORMS,
                **GGUF_EXPERT_NAMES,
            },
            biases=GGUF_ATTENTION_BIAS,
            fields={
                **GGUF_EXPERT_FIELDS,
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_weights_norm": "norm_topk_prob",
            },
            extra_config=_gguf_config,
        ),
    ),
)
