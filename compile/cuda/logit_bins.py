"""Bins of logits by depth, and borders of top-k and top-p.

A depth is the distance below the largest logit. Triton functions that the kernels of `compile.cuda.sampling` share.
Weights are integers: no sum depends on an order.
"""

from __future__ import annotations

import triton
import triton.language as tl

BINS = tl.constexpr(1024)
"""32 to each power of 2, for depths of 2^-8 to 2^24."""
COUNTS, MASSES = tl.constexpr(0), tl.constexpr(1024)
"""Offsets of the bins' sums in a row's state."""
NUM = tl.constexpr(2048)
"""Offset in a row's state of the number of copied tokens; those of borders follow."""
BIN, ABOVE, MASS_ABOVE = tl.constexpr(2049), tl.constexpr(2050), tl.constexpr(2051)
"""The bin of top-k's border, tokens and mass above it."""
FIRST, LAST, MASS_BEFORE = tl.constexpr(2052), tl.constexpr(2053), tl.constexpr(2054)
"""The first and the last bin of top-p's border, and the mass above them."""
STATE = tl.constexpr(2056)
EVERYTHING = tl.constexpr(0xFFFFFFFF)
"""Rank of the last token: no border."""


@triton.jit
def divisor_of(temperature):
    return tl.minimum(tl.maximum(temperature, 1.1754943508222875e-38), 3.4028234663852886e38).to(tl.float32)


@triton.jit
def row_top(tops_ptr, temperature, cold, CHUNKS: tl.constexpr):
    """Offset subtracted from cold logits, and the largest logit after division."""
    i, chunks = tl.arange(0, CHUNKS), tl.num_programs(1)
    tops = tl.load(tops_ptr + tl.program_id(0) * chunks + i, mask=i < chunks, other=float("-inf"))
    zero = tl.minimum(tl.maximum(tl.max(tops, 0), -3.4028234663852886e38), 3.4028234663852886e38)
    tops = tl.where(temperature < cold, tl.div_rn(tops - zero, divisor_of(temperature) + i * 0.0), tops)
    return zero, tl.max(tops, 0)


@triton.jit
def rank_of(x):
    """Integers 0..2^32-1 in the order of floats, the largest first."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # no -0
    return 0x7FFFFFFF - (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def depth_of(x, top):
    """Depths below the largest as ordered integers: the bits of non-negative floats."""
    return (top - x + 0.0).to(tl.int32, bitcast=True)  # no -0


@triton.jit
def bin_of(x, top):
    return tl.minimum(tl.maximum((depth_of(x, top) >> 18) - (0x3B800000 >> 18), 0), BINS - 1)


@triton.jit
def mass_of(x, top):
    """Return 2^40 times the probability relative to the maximum."""
    return tl.where(x > float("-inf"), (tl.exp(x - top) * 1099511627776.0).to(tl.int64), 0)


@triton.jit
def load_copied(copied_ptr, start, num, first, last, top, limit, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Load weights and orders of copied tokens in these bins.

    Ranks are at most `limit`. Other tokens have weight 0 and order -1. Orders are depths for masses, else ranks.
    """
    at = start + tl.arange(0, BLOCK)
    x = tl.load(copied_ptr + at, mask=at < num, other=float("-inf"))
    bin = bin_of(x, top)
    among = (at < num) & (bin >= first) & (bin <= last) & (rank_of(x) <= limit)
    weight = mass_of(x, top) if MASS else at.to(tl.int64) * 0 + 1
    order = depth_of(x, top).to(tl.int64) if MASS else rank_of(x)
    return tl.where(among, weight, 0), tl.where(among, order, -1)


@triton.jit
def find_border(copied_ptr, num, first, last, top, limit, above, need, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Bisect for the first order whose weight, with `above`, reaches `need`."""
    low, high = limit * 0 + EVERYTHING, limit * 0
    for start in range(0, num, BLOCK):
        _weight, order = load_copied(copied_ptr, start, num, first, last, top, limit, MASS, BLOCK)
        low = tl.minimum(low, tl.min(tl.where(order < 0, EVERYTHING, order), 0))
        high = tl.maximum(high, tl.max(order, 0))
    while low < high:
        middle = (low + high) >> 1
        reached = above
        for start in range(0, num, BLOCK):
            weight, order = load_copied(copied_ptr, start, num, first, last, top, limit, MASS, BLOCK)
            reached += tl.sum(tl.where(order <= middle, weight, 0), 0)
        enough = reached.to(tl.float64) >= need
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low
