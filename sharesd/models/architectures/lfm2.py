"""LFM2: short convolutions, and attention in some layers; LFM2-MoE: the same with mixtures after a few dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharesd.models.architecture import (
    GGUF_EXPERT_FIELDS,
    Architecture,
    GGUFLayout,
    llama_like,
    read_experts,
    recurrent_layers,
)
from sharesd.models.decoder_config import DecoderConfig, LayerType
from sharesd.models.hf_config import HFConfig, wrong_value

_MAX_WIDTH = 16
"""Maximum inputs of a convolution: `sharesd.kvcache.recurrent` keeps more than those for each round."""
_NAMES: dict[str, tuple[str, ...]] = {
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.o": ("self_attn.out_proj",),
    "attn.q_norm": ("self_attn.q_layernorm",),
    "attn.k_norm": ("self_attn.k_layernorm",),
    "conv.in_proj": ("conv.in_proj",),
    "conv.kernel": ("conv.conv",),
    "conv.out_proj": ("conv.out_proj",),
    "attn_norm": ("operator_norm",),
    "mlp_norm": ("ffn_norm",),
    "mlp.gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "mlp.down": ("feed_forward.w2",),
}
_GGUF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_EXPERT_NAMES: dict[str, tuple[str, ...]] = {
    "mlp.router": ("feed_forward.gate",),
    "mlp.router_bias": ("feed_forward.gate",),
    "mlp.experts.*.down": ("feed_forward.experts.*.w2",),
    "mlp.experts.*.gate_up": ("feed_forward.experts.*.w1", "feed_forward.experts.*.w3"),
}
_CHOICE = "feed_forward.gate.e_score_correction_bias"
_MERGED_EXPERTS: dict[str, tuple[str, ...]] = {
    "feed_forward.expert_bias": (_CHOICE,),
    "feed_forward.experts.gate_up_proj": ("feed_forward.experts.*.w1.weight", "feed_forward.experts.*.w3.weight"),
    "feed_forward.experts.down_proj": ("feed_forward.experts.*.w2.weight",),
}
_GGUF_EXPERT_NAMES = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.*.w1",
    "ffn_up_exps": "feed_forward.experts.*.w3",
    "ffn_down_exps": "feed_forward.experts.*.w2",
}
_SIGMOID = 2
"""Number of the router's function in .gguf files."""
_GGUF_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",  # of the last block's output, whatever its name says
    "output": "lm_head",
}

_GGUF_OTHER_NAMES = {"output_norm.weight": "token_embd_norm.weight"}


def _layer_types(config: HFConfig) -> tuple[LayerType, ...]:
    num_layers, width = config.require("num_hidden_layers"), config.get("conv_L_cache", 3)
    if width > _MAX_WIDTH:
        raise wrong_value(config.model_type, "conv_L_cache", width, f"at most {_MAX_WIDTH}")
    attends = config.get("full_attn_idxs", range(num_layers))
    default = ["full_attention" if i in attends else "conv" for i in range(num_layers)]
    return recurrent_layers(config, default, kind="conv", kinds="convolutions", conv_width=width)


def _intermediate_size(config: HFConfig) -> int:
    size: int = config.get("block_ff_dim", config.require("intermediate_size"))
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size, factor = int(2 * size / 3), config.get("block_ffn_dim_multiplier", 1.0)
    multiple = config.get("block_multiple_of", 256)
    return -(-int(factor * size) // multiple) * multiple


def _read(config: HFConfig) -> DecoderConfig:
    return llama_like(
        config,
        layer_types=_layer_types(config),
        intermediate_size=_intermediate_size(config),
        rms_norm_eps=config.get("norm_eps", 1e-5),
        tie_word_embeddings=config.get("tie_embedding", config.get("tie_word_embeddings", True)),
        use_qk_norm=True,
        conv_bias=config.get("conv_bias", False),
    )


def _read_moe(config: HFConfig) -> DecoderConfig:
    for name, only in (("use_expert_bias", True), ("expert_gating_func", _SIGMOID)):
        if config.get(name, only) != only:
            raise config.unsupported(f"{name} {config.get(name)!r}")
    experts = read_experts(
        config, config.require("moe_intermediate_size"), norm_topk_prob=config.get("norm_topk_prob", True)
    )
    if experts is None:
        raise wrong_value(config.model_type, "num_experts", 0, "a number above 0")
    factor, dense = config.get("routed_scaling_factor", 1.0), config.get("num_dense_layers", 2)
    layers = (kind._replace(has_experts=i >= dense) for i, kind in enumerate(_layer_types(config)))
    return llama_like(
        config,
        layer_types=tuple(layers),
        rms_norm_eps=config.get("norm_eps", 1e-5),
        tie_word_embeddings=config.get("tie_embedding", config.get("tie_word_embeddings", True)),
        use_qk_norm=True,
        conv_bias=config.get("conv_bias", False),
        experts=experts._replace(has_bias=True, scaling_factor=factor, sum_eps=1e-6),
    )


def _gguf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "norm_eps": config["rms_norm_eps"], "block_auto_adjust_ff_dim": False}


def _gguf_moe_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "norm_eps": config["rms_norm_eps"],
        "num_dense_layers": config.get("num_dense_layers", 0),
    }


ARCHITECTURES = (
    Architecture(
        model_type="lfm2",
        to_decoder_config=_read,
        defaults={
            "intermediate_size": 12288,
            "max_position_embeddings": 128000,
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
        },
        block_names=_NAMES,
        final_norm="model.embedding_norm",
        gguf=GGUFLayout(
            name="lfm2",
            class_name="Lfm2ForCausalLM",
            block_names=_GGUF_NAMES,
            outer_names=_GGUF_OUTER_NAMES,
            biases={"conv_bias": ("shortconv.in_proj", "shortconv.conv", "shortconv.out_proj")},
            fields={"shortconv.l_cache": "conv_L_cache"},
            other_names=_GGUF_OTHER_NAMES,
            layer_kind="conv",
            always_lists=True,
            extra_config=_gguf_config,
        ),
    ),
    Architecture(
        model_type="lfm2_moe",
        to_decoder_config=_read_moe,
        defaults={
            "intermediate_size": 7168,
            "max_position_embeddings": 128000,
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
        },
        block_names={**_NAMES, **_EXPERT_NAMES},
        merged_experts=_MERGED_EXPERTS,
        final_norm="model.embedding_norm",
        gguf=GGUFLayout(
            name="lfm2moe",
            class_name="Lfm2MoeForCausalLM",
            block_names={**_GGUF_NAMES, **_GGUF_EXPERT_NAMES},
            outer_names=_GGUF_OUTER_NAMES,
            tensors={"exp_probs_b.bias": _CHOICE},
            biases={"conv_bias": ("shortconv.in_proj", "shortconv.conv", "shortconv.out_proj")},
            fields={
                **GGUF_EXPERT_FIELDS,
                "shortconv.l_cache": "conv_L_cache",
                "expert_feed_forward_length": "moe_intermediate_size",
                "leading_dense_block_count": "num_dense_layers",
                "expert_gating_func": "expert_gating_func",
                "expert_weights_norm": "norm_topk_prob",
                "expert_weights_scale": "routed_scaling_factor",
            },
            other_names=_GGUF_OTHER_NAMES,
            layer_kind="conv",
            always_lists=True,
            extra_config=_gguf_moe_config,
        ),
    ),
)
