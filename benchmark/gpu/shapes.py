"""Sizes of common models and their linears, sizes of widened models, and copy bandwidth."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WideShape:
    """Sizes of a decoder that widening may choose; head size and vocabulary stay as they are."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_layers: int

    def num_parameters(self, *, vocab_size: int, head_dim: int, tie_word_embeddings: bool) -> int:
        """Weights of the whole model."""
        D = self.hidden_size
        attention = 2 * D * head_dim * (self.num_attention_heads + self.num_key_value_heads)
        return (
            self.num_layers * (attention + 3 * D * self.intermediate_size + 2 * D)
            + D
            + vocab_size * D * (1 if tie_word_embeddings else 2)
        )


SHAPES = {
    "135m": WideShape(576, 1536, 9, 3, 30),
    "1b": WideShape(2304, 2688, 24, 8, 32),
    "7b": WideShape(4096, 11008, 66, 22, 36),
    "13b": WideShape(5120, 13824, 78, 26, 45),
}
"""Values of --to of `sharesd bench widen`. All sizes but those of `135m` are multiples of 128."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Weights [outputs, inputs] and the operations fused into their kernel."""

    outputs: int
    inputs: int
    norm: bool = False
    gated: str = ""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model from its checkpoint's configuration."""

    name: str
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def linears(self) -> dict[str, LinearShape]:
        """Linears of a layer by name, with fused norms and residuals."""
        queries = self.heads * self.head_dim
        return {
            "qkv": LinearShape(queries + 2 * self.kv_heads * self.head_dim, self.hidden, norm=True),
            "o": LinearShape(self.hidden, queries),
            "gate_up": LinearShape(2 * self.mlp, self.hidden, norm=True, gated="silu"),
            "down": LinearShape(self.hidden, self.mlp),
        }

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the linears of a layer."""
        return {name: (linear.outputs, linear.inputs) for name, linear in self.linears.items()}


MODELS = (
    ModelShape("Llama-2-7B", 4096, 11008, 32, 32, 128),
    ModelShape("Llama-3.1-8B", 4096, 14336, 32, 8, 128),
    ModelShape("Qwen2.5-7B", 3584, 18944, 28, 4, 128),
    ModelShape("Qwen3-4B", 2560, 9728, 32, 8, 128),
    ModelShape("SmolLM2-135M", 576, 1536, 9, 3, 64),
)
VOCAB = 49_152  # of the embedded model, also when it is widened


def linears(size: str) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of the embedded model's linears, widened to `size`."""
    model = MODELS[-1]
    if size != "135m":
        shape = SHAPES[size]
        model = ModelShape(
            size, shape.hidden_size, shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads, 64
        )
    return {**model.sizes, "head": (VOCAB, model.hidden)}


def model_of(folder: Path) -> ModelShape:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    return ModelShape(folder.name, hidden, config["intermediate_size"], heads, kv_heads, head_dim)


@cache
def copy_bandwidth(device: str) -> float:
    """Return bytes read and written per second by a large copy, cached."""
    import torch

    from compile.cuda.bench import seconds_per_call

    source = torch.ones(2**28 if device.startswith("cuda") else 2**22, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_per_call([lambda: target.copy_(source)])
