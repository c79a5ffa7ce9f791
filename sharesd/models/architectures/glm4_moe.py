"""GLM-4.5 to 4.7: dense layers, then mixtures with a shared expert; heads are rotated in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharesd.models.architecture import (
    BLOCK_NAMES,
    EXPERT_NAMES,
    GGUF_BLOCK_NAMES,
    GGUF_EXPERT_NAMES,
    GGUF_HEAD_NORMS,
    MERGED_EXPERTS,
    Architecture,
    GGUFLayout,
    MTPLayout,
    llama_like,
    read_experts,
)
from sharesd.models.decoder_config import DecoderConfig, LayerType
from sharesd.models.hf_config import HFConfig, wrong_value

_SIGMOID = 2
"""Number of the router's function in .gguf files."""
_SHARED = "mlp.shared_experts"


def _read(config: HFConfig) -> DecoderConfig:
    for name, only in (("n_group", 1), ("n_shared_experts", 1), ("expert_gating_func", _SIGMOID)):
        if config.get(name, only) != only:
            raise config.unsupported(f"{name} {config.get(name)!r}")
    size, norm = config.require("moe_intermediate_size"), config.get("norm_topk_prob", True)
    experts = read_experts(config, size, norm_topk_prob=norm, name="n_routed_experts")
    if experts is None:
        raise wrong_value(config.model_type, "n_routed_experts", 0, "a number above 0")
    factor, dense = config.get("routed_scaling_factor", 1.0), config.get("first_k_dense_replace", 1)
    return llama_like(
        config,
        partial_rotary=True,
        layer_types=tuple(LayerType(0, 0, i >= dense) for i in range(config.require("num_hidden_layers"))),
        qkv_bias=config.get("attention_bias", False),
        use_qk_norm=config.get("use_qk_norm", False),
        experts=experts._replace(has_bias=True, wide_router=True, scaling_factor=factor, has_shared_expert=True),
    )


def _gguf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"] - config.get("num_nextn_predict_layers", 0)  # files count all
    absent = {"norm_topk_prob": False, "first_k_dense_replace": 0}  # as llama.cpp has it
    found = {name: config.get(name, value) for name, value in absent.items()}
    return {"hidden_act": "silu", "num_hidden_layers": layers, **found}


ARCHITECTURES = (
    Architecture(
        model_type="glm4_moe",
        to_decoder_config=_read,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        block_names={
            **BLOCK_NAMES,
            **EXPERT_NAMES,
            "mlp.router_bias": ("mlp.gate",),
            "mlp.shared_expert.down": (f"{_SHARED}.down_proj",),
            "mlp.shared_expert.gate_up": (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"),
        },
        merged_experts=MERGED_EXPERTS,
        mtp=MTPLayout(
            root="model.layers.{}.",
            block="",
            fc="eh_proj",
            embed_norm="enorm",
            state_norm="hnorm",
            norm="shared_head.norm",
            copies=("embed_tokens", "shared_head.head"),
        ),
        gguf=GGUFLayout(
            name="glm4moe",
            class_name="Glm4MoeForCausalLM",
            block_names={
                **{part: name for part, name in GGUF_BLOCK_NAMES.items() if part != "ffn_norm"},
                **GGUF_HEAD_NORMS,
                **GGUF_EXPERT_NAMES,
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_shexp": f"{_SHARED}.gate_proj",
                "ffn_up_shexp": f"{_SHARED}.up_proj",
                "ffn_down_shexp": f"{_SHARED}.down_proj",
            },
            tensors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
            biases={"attention_bias": ("attn_q", "attn_k", "attn_v")},
            shown_by={"use_qk_norm": "attn_q_norm"},
            partial_rotary=True,
            fields={
                "expert_count": "n_routed_experts",
                "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_count": "n_shared_experts",
                "expert_gating_func": "expert_gating_func",
                "expert_weights_norm": "norm_topk_prob",
                "expert_weights_scale": "routed_scaling_factor",
                "leading_dense_block_count": "first_k_dense_replace",
                "nextn_predict_layers": "num_nextn_predict_layers",
            },
            extra_config=_gguf_config,
        ),
    ),
)
