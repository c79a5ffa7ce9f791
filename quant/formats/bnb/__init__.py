"""bitsandbytes: nf4 (Dettmers et al. 2023), LLM.int8 (Dettmers et al. 2022)."""

from __future__ import annotations

from quant.formats import QuantFormat


def _nbytes(N: int, K: int, bits: int, group_size: int) -> int:
    """Return the bytes of codes and float32 scales per row or group."""
    return N * K + 4 * N if bits == 8 else N * K // 2 + 4 * (N * K // group_size)


FORMAT = QuantFormat(
    name="bnb",
    bits=(8, 4),
    group_sizes=(64, 128, 256),
    row_bits=(8,),
    acceptance={8: 0.95, 4: 0.80},
    tree_misses={8: {0: 1.0, 2: 0.5, 4: 0.5}, 4: {0: 1.0, 2: 0.8, 4: 0.6}},
    nbytes=_nbytes,
    check="quant.formats.bnb.linears:check",
    linears=dict.fromkeys(("cpu", "cuda"), "quant.formats.bnb.linears:linear"),
)
