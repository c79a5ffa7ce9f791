"""Mistral: Llama with a sliding window in all layers. Ministral 3 and Devstral 2 add YaRN and queries that grow.

The architecture in their .gguf files is llama, that of the latter two mistral3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sharesd.models.architecture import Architecture, GGUFLayout, default_gguf_config, llama_like
from sharesd.models.decoder_config import DecoderConfig, LayerType
from sharesd.models.hf_config import HFConfig

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Positions of Ministral 3 where a config says nothing about them."""


def _read(config: HFConfig) -> DecoderConfig:
    layer = LayerType(config.get("sliding_window") or 0, 0)
    return llama_like(config, layer_types=(layer,) * config.require("num_hidden_layers"))


def _read_ministral3(config: HFConfig) -> DecoderConfig:
    return replace(_read(config), llama_4_scaling_beta=config.get_rope("llama_4_scaling_beta") or 0.0)


def _gguf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Files that say nothing about positions have plain ones."""
    return {**default_gguf_config(config), "rope_scaling": {"rope_type": "default"}}


ARCHITECTURES = (
    Architecture(
        model_type="mistral",
        to_decoder_config=_read,
        defaults={"max_position_embeddings": 131072, "eos_token_id": 2, "sliding_window": 4096},
    ),
    Architecture(
        model_type="ministral3",
        to_decoder_config=_read_ministral3,
        defaults={
            "max_position_embeddings": 262144,
            "eos_token_id": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _ROPE,
        },
        gguf=GGUFLayout(
            name="mistral3",
            class_name="Ministral3ForCausalLM",
            pairs_rows=True,
            yarn_fields=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
            extra_config=_gguf_config,
        ),
    ),
)
