"""The linears of common models, by the sizes that their configurations state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Linear:
    """Weights [outputs, inputs] and what is done in the same launch."""

    outputs: int
    inputs: int
    norm: bool = False
    gated: str = ""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes from a checkpoint's configuration."""

    name: str
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def linears(self) -> dict[str, Linear]:
        """A layer's: the first and third follow a norm, the others add a residual."""
        queries = self.heads * self.head_dim
        return {
            "qkv": Linear(queries + 2 * self.kv_heads * self.head_dim, self.hidden, norm=True),
            "o": Linear(self.hidden, queries),
            "gate_up": Linear(2 * self.mlp, self.hidden, norm=True, gated="silu"),
            "down": Linear(self.hidden, self.mlp),
        }


MODELS = (
    Model("Llama-2-7B", 4096, 11008, 32, 32, 128),
    Model("Llama-3.1-8B", 4096, 14336, 32, 8, 128),
    Model("Qwen2.5-7B", 3584, 18944, 28, 4, 128),
    Model("Qwen3-4B", 2560, 9728, 32, 8, 128),
    Model("SmolLM2-135M", 576, 1536, 9, 3, 64),
)


def model_of(folder: Path) -> Model:
    """The model of a checkpoint's folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    return Model(folder.name, hidden, config["intermediate_size"], heads, kv_heads, head_dim)
