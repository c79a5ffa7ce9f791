"""SmolLM3: every fourth layer has no positions."""

from __future__ import annotations

from sharesd.models.architecture import Architecture, llama_like, mixed_layers
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.hf_config import HFConfig


def _read(config: HFConfig) -> DecoderConfig:
    every = config.get("no_rope_layer_interval", 4)
    flags = config.get("no_rope_layers", [(i + 1) % every for i in range(config.require("num_hidden_layers"))])
    ropes = [0 if flag else -1 for flag in flags]  # despite the field's name, 1 means that the layer has positions
    window = (config.get("sliding_window") or 0) if config.get("use_sliding_window", False) else 0
    bias = config.get("attention_bias", False)
    return llama_like(
        config,
        layer_types=mixed_layers(config, window=window, slides=lambda i: ropes[i] < 0, ropes=ropes),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.get("mlp_bias", False),
    )


ARCHITECTURES = (
    Architecture(
        model_type="smollm3",
        to_decoder_config=_read,
        defaults={"max_position_embeddings": 32768, "tie_word_embeddings": True, "rope_theta": 2e6},
    ),
)
