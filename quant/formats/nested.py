"""Upper halves of weights stored as Q8_0, without bytes of their own."""

from __future__ import annotations

from typing import Any

from quant.formats import QuantFormat


def check(name: str, shape: tuple[int, int], **options: Any) -> None:
    """Accept every shape, since the weights are stored already."""


def linear(name: str, full: Any, bias: Any, **options: Any) -> Any:
    """Return the linear that reads a part of the full one's memory."""
    return full.upper_halves()


FORMAT = QuantFormat(
    name="nested",
    bits=(4,),
    group_sizes=(64,),
    acceptance={4: 0.80},
    tree_misses={4: {0: 1.0, 2: 0.8, 4: 0.6}},
    nbytes=lambda N, K, bits, group_size: 0,
    check="quant.formats.nested:check",
    linears={"cpu": "quant.formats.nested:linear"},
    is_nested=True,
)
