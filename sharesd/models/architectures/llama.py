"""Llama 1 to 3 and models with the same block: Vicuna, SmolLM2."""

from __future__ import annotations

from sharesd.models.architecture import GGUF_BIASES, Architecture, GGUFLayout, llama_like
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.hf_config import HFConfig


def _read(config: HFConfig) -> DecoderConfig:
    bias = config.get("attention_bias", False)
    return llama_like(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.get("mlp_bias", False))


ARCHITECTURES = (
    Architecture(
        model_type="llama",
        to_decoder_config=_read,
        defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
        gguf=GGUFLayout(name="llama", class_name="LlamaForCausalLM", biases=GGUF_BIASES, pairs_rows=True),
    ),
)
