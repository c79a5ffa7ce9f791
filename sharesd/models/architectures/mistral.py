"""Mistral: Llama with a sliding window in all layers.

The architecture in its .gguf files is llama.
"""

from __future__ import annotations

from sharesd.models.architecture import Architecture, llama_like
from sharesd.models.decoder_config import DecoderConfig, LayerType
from sharesd.models.hf_config import HFConfig


def _read(config: HFConfig) -> DecoderConfig:
    layer = LayerType(config.get("sliding_window") or 0, 0)
    return llama_like(config, layer_types=(layer,) * config.require("num_hidden_layers"))


ARCHITECTURES = (
    Architecture(
        model_type="mistral",
        to_decoder_config=_read,
        defaults={"max_position_embeddings": 131072, "eos_token_id": 2, "sliding_window": 4096},
    ),
)
