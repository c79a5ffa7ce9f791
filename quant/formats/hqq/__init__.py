"""HQQ (Badri and Shaji 2023); at 8 bits rounding to nearest.

The project's kernels multiply: C++ on a CPU, Triton on CUDA, or gemlite if measured to be faster.
"""

from __future__ import annotations

from quant.formats import QuantFormat


def _nbytes(N: int, K: int, bits: int, group_size: int) -> int:
    """Return the bytes of `QuantizedPackedLinear`.

    Tiles have 16 rows. Codes of 3 and 2 bits are stored in 4 bits.
    """
    container, group = (8, K) if bits == 8 else (4, group_size)
    return -(-N // 16) * (K // group) * 16 * (group * container // 8 + 4)


_FEW_BITS = {0: 1.0, 2: 0.8, 4: 0.6}

FORMAT = QuantFormat(
    name="hqq",
    bits=(8, 4, 3, 2),
    group_sizes=(32, 64, 128, 256),
    row_bits=(8,),
    # 4 bits: 0.6 to 0.8 for a model of 135M parameters, 0.97 for published ones of 7B.
    acceptance={8: 0.95, 4: 0.80, 3: 0.45, 2: 0.20},
    # Where 8 bits miss, their second choice is nearly always right.
    tree_misses={8: {0: 1.0, 2: 0.5, 4: 0.5}, 4: _FEW_BITS, 3: _FEW_BITS, 2: _FEW_BITS},
    planned_bits=(4, 8),
    nbytes=_nbytes,
    check="quant.formats.hqq.linears:check",
    solver="quant.formats.hqq.solver:solve",
    cached_bits=(4, 3, 2),
    calibrated_bits=(4, 3, 2),
    linears={"cpu": "quant.formats.hqq.linears:cpu_linear", "cuda": "quant.formats.hqq.linears:cuda_linear"},
)
