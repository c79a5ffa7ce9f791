"""Sizes of gated delta rules; imports no torch."""

from __future__ import annotations

from typing import NamedTuple

VALUES = 16
"""Values of a matrix that lie together, as cpu/delta_rule.h wants it."""


class DeltaSizes(NamedTuple):
    """Heads of gated delta rules, which all such layers of a model share."""

    key_heads: int
    """Heads of queries and keys; divides `value_heads`."""
    value_heads: int
    key_size: int
    value_size: int
    tiled: bool = False
    """Value head h reads key head h modulo `key_heads`, instead of neighbours sharing one."""

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_size + self.outputs

    @property
    def outputs(self) -> int:
        return self.value_heads * self.value_size

    @property
    def inputs(self) -> int:
        """Numbers that are kept of a token."""
        return self.channels + 2 * self.value_heads

    @property
    def matrices(self) -> tuple[int, int, int, int]:
        """Shape of a row's matrices in memory [N, v / 16, k, 16]: numbers after the values of a head are 0."""
        return self.value_heads, -(-self.value_size // VALUES), self.key_size, VALUES
