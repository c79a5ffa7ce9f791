"""Phi-3: merged Q, K and V, and merged gate and up.

Heads may be rotated in part.
"""

from __future__ import annotations

from sharesd.models.architecture import BLOCK_NAMES, Architecture, GGUFLayout, llama_like
from sharesd.models.decoder_config import DecoderConfig, LayerType
from sharesd.models.hf_config import HFConfig, read_rope


def _read(config: HFConfig) -> DecoderConfig:
    layer = LayerType(config.get("sliding_window") or 0, 0)
    return llama_like(
        config,
        rope_parameters=[read_rope(config, aliases={"yarn": "longrope"})],  # an earlier name of the same rule
        partial_rotary=True,
        layer_types=(layer,) * config.require("num_hidden_layers"),
    )


ARCHITECTURES = (
    Architecture(
        model_type="phi3",
        to_decoder_config=_read,
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        block_names={**BLOCK_NAMES, "attn.qkv": ("self_attn.qkv_proj",), "mlp.gate_up": ("mlp.gate_up_proj",)},
        gguf=GGUFLayout(
            name="phi3",
            class_name="Phi3ForCausalLM",
            block_names={
                "attn_qkv": "self_attn.qkv_proj",
                "attn_output": "self_attn.o_proj",
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
                "attn_norm": "input_layernorm",
                "ffn_norm": "post_attention_layernorm",
            },
            fields={"attention.sliding_window": "sliding_window"},
            ropes=("default", "linear", "longrope", "divisors"),
            partial_rotary=True,
        ),
    ),
)
