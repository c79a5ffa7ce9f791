"""gpt-oss: experts with biases and a clamped gate, attention with sinks, every other layer with a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compile.activations import SWIGLU_OAI
from sharesd.models.architecture import (
    BLOCK_NAMES,
    EXPERT_NAMES,
    GGUF_ATTENTION,
    GGUF_ATTENTION_BIAS,
    MERGED_EXPERTS,
    Architecture,
    GGUFLayout,
    llama_like,
    mixed_layers,
    read_experts,
)
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.hf_config import HFConfig, wrong_value

_ROUTER, _EXPERT = "mlp.router", "mlp.experts.*."


def _read(config: HFConfig) -> DecoderConfig:
    for name, only in (("hidden_act", "silu"), ("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.get(name, only) != only:
            raise config.unsupported(f"{name} {config.get(name)!r}")
    size = config.require("intermediate_size")
    experts = read_experts(config, size, norm_topk_prob=True, name="num_local_experts")
    if experts is None:
        raise wrong_value(config.model_type, "num_local_experts", 0, "a number above 0")
    layers = mixed_layers(config, window=config.get("sliding_window") or 0, slides=lambda i: i % 2 == 0)
    bias = config.get("attention_bias", True)
    found = llama_like(
        config,
        layer_types=tuple(kind._replace(has_experts=True) for kind in layers),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        attention_sinks=True,
        experts=experts._replace(router_bias=True),
    )
    return replace(found, hidden_act=SWIGLU_OAI)


def _gguf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_bias": True}


ARCHITECTURES = (
    Architecture(
        model_type="gpt_oss",
        to_decoder_config=_read,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
        },
        block_names={
            **BLOCK_NAMES,
            **EXPERT_NAMES,
            "mlp.router": (_ROUTER,),
            "attn.sink": ("self_attn",),
        },
        merged_experts={
            **MERGED_EXPERTS,
            "mlp.experts.gate_up_proj_bias": (f"{_EXPERT}gate_proj.bias", f"{_EXPERT}up_proj.bias"),
            "mlp.experts.down_proj_bias": (f"{_EXPERT}down_proj.bias",),
        },
        experts_alternate=True,
        gguf=GGUFLayout(
            name="gpt-oss",
            class_name="GptOssForCausalLM",
            block_names={
                **GGUF_ATTENTION,
                "attn_output": "self_attn.o_proj",
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_inp": _ROUTER,
                "ffn_gate_exps": f"{_EXPERT}gate_proj",
                "ffn_up_exps": f"{_EXPERT}up_proj",
                "ffn_down_exps": f"{_EXPERT}down_proj",
            },
            tensors={"attn_sinks.weight": "self_attn.sinks"},
            biases=GGUF_ATTENTION_BIAS,
            fields={
                "expert_count": "num_local_experts",
                "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "intermediate_size",
                "attention.sliding_window": "sliding_window",
            },
            ropes=("default", "yarn"),
            yarn_config={"truncate": False},
            extra_config=_gguf_config,
        ),
    ),
)
