"""Mixtral: Mistral, with a mixture of experts for the MLP of all layers.

The architecture in its .gguf files is llama.
"""

from __future__ import annotations

from sharesd.models.architecture import (
    BLOCK_NAMES,
    GGUF_ATTENTION,
    GGUF_EXPERT_FIELDS,
    Architecture,
    GGUFLayout,
    llama_like,
    read_experts,
)
from sharesd.models.decoder_config import DecoderConfig, LayerType
from sharesd.models.hf_config import HFConfig, wrong_value

_ROUTER, _EXPERT = "block_sparse_moe.gate", "block_sparse_moe.experts.*."
_GATE, _DOWN, _UP = (_EXPERT + part for part in ("w1", "w2", "w3"))


def _read(config: HFConfig) -> DecoderConfig:
    if "num_experts" not in config:  # the name that transformers 5 knows, too
        config.require("num_local_experts")
    experts = read_experts(config, config.require("intermediate_size"), norm_topk_prob=True)
    if experts is None:
        raise wrong_value(config.model_type, "num_local_experts", 0, "a number above 0")
    layer = LayerType(config.get("sliding_window") or 0, 0, has_experts=True)
    return llama_like(config, layer_types=(layer,) * config.require("num_hidden_layers"), experts=experts)


ARCHITECTURES = (
    Architecture(
        model_type="mixtral",
        to_decoder_config=_read,
        defaults={
            "max_position_embeddings": 131072,
            "eos_token_id": 2,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        block_names={
            **BLOCK_NAMES,
            "mlp.router": (_ROUTER,),
            "mlp.experts.*.down": (_DOWN,),
            "mlp.experts.*.gate_up": (_GATE, _UP),
        },
        merged_experts={
            "mlp.gate.weight": (f"{_ROUTER}.weight",),
            "mlp.experts.gate_up_proj": (f"{_GATE}.weight", f"{_UP}.weight"),
            "mlp.experts.down_proj": (f"{_DOWN}.weight",),
        },
        gguf=GGUFLayout(
            name="llama",
            class_name="MixtralForCausalLM",
            block_names={
                **GGUF_ATTENTION,
                "attn_output": "self_attn.o_proj",
                "attn_norm": "input_layernorm",
                "ffn_norm": "post_attention_layernorm",
                "ffn_gate_inp": _ROUTER,
                "ffn_gate_exps": _GATE,
                "ffn_up_exps": _UP,
                "ffn_down_exps": _DOWN,
            },
            pairs_rows=True,
            fields=GGUF_EXPERT_FIELDS,
        ),
    ),
)
