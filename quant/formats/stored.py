"""Weights as they are, of which drafts of a mixture read those of fewer experts."""

from __future__ import annotations

from quant.formats import QuantFormat

FORMAT = QuantFormat(
    name="stored",
    bits=(4,),  # of no weight: keys of the two below
    group_sizes=(64,),
    acceptance={4: 0.70},
    tree_misses={4: {0: 1.0, 2: 0.8, 4: 0.6}},
    nbytes=lambda N, K, bits, group_size: 0,
    check="",
    linears={},
    keeps_weights=True,
)
