"""Sizes of widened models.

Shapes, for heads of 64 and three query heads to a key/value head, with a tied embedding of 49,152 tokens:

| --to | parameters | hidden | MLP | heads | layers | bfloat16 |
| --- | --- | --- | --- | --- | --- | --- |
| 135m | 0.13e9 | 576 | 1,536 | 9 + 3 | 30 | 0.3 GB |
| 1b | 1.01e9 | 2,304 | 2,688 | 24 + 8 | 32 | 2.0 GB |
| 7b | 6.73e9 | 4,096 | 11,008 | 66 + 22 | 36 | 13.5 GB |
| 13b | 12.87e9 | 5,120 | 13,824 | 78 + 26 | 45 | 25.7 GB |

`135m` is the size of SmolLM2-135M, and makes a copy of it. `1b` has four times its hidden size: norms are scaled by
exactly 1/2, so that bfloat16 rounds as before. At the other sizes results agree up to rounding, as those of another
kernel would.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WideShape:
    """Sizes of a decoder that widening may choose.

    Head size and vocabulary stay as they are.
    """

    hidden_size: int
    """Size of the residual stream."""
    intermediate_size: int
    """Size between gate/up and down."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key/value heads."""
    num_layers: int
    """Blocks."""

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
    "135m": WideShape(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, num_layers=30
    ),
    "1b": WideShape(
        hidden_size=2304, intermediate_size=2688, num_attention_heads=24, num_key_value_heads=8, num_layers=32
    ),
    "7b": WideShape(
        hidden_size=4096, intermediate_size=11008, num_attention_heads=66, num_key_value_heads=22, num_layers=36
    ),
    "13b": WideShape(
        hidden_size=5120, intermediate_size=13824, num_attention_heads=78, num_key_value_heads=26, num_layers=45
    ),
}
"""Values of --to. All sizes but those of `135m` are multiples of 128."""
