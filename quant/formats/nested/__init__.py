"""Upper halves of weights stored as Q8_0, without bytes of their own."""

from __future__ import annotations

from quant.formats import QuantFormat

FORMAT = QuantFormat(
    name="nested",
    bits=(4,),
    group_sizes=(64,),
    acceptance={4: 0.80},
    tree_misses={4: {0: 1.0, 2: 0.8, 4: 0.6}},
    nbytes=lambda N, K, bits, group_size: 0,
    check="quant.formats.nested.linears:check",
    linears={"cpu": "quant.formats.nested.linears:linear"},
    is_nested=True,
)
