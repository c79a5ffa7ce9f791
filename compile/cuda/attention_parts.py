"""What kernels of attention share: a part of the slots, and the join of parts.

Legend as in `compile.cuda.attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compile.cuda.kv_q8 import load_q8

ROWS = 16
"""Queries of a tile. Bits depend on it, as on SPLIT."""
SPLIT = 128
"""Slots of a part."""
GROUP = 32
"""Parts whose largest scores are joined at once. Bits depend on it."""
NO_WINDOW = 1 << 30
"""Window without limit."""
# One binary serves all steps: values that differ between them must not make another.
UNALIGNED = ["length_ptr", "depth_ptr", "path_ptr"]
INTS = ["T", "S", "P", "X", "num_programs", "window", "recent"]


@triton.jit
def recent_from(own, recent, CHUNK: tl.constexpr):
    """First recent position that a query at position `own` attends to."""
    return tl.maximum(own + 1 - recent, 0) // CHUNK * CHUNK


@triton.jit
def is_seen(part, first, end, window, recent, SPLIT: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr):
    """True if queries from position `first` on, and before `end`, attend to slots of a part."""
    begin = part * SPLIT
    end_slot = begin + SPLIT
    in_view = (begin < end) & (end_slot > first + 1 - window)
    return in_view & ((begin < SINKS) | (end_slot > recent_from(first, recent, CHUNK)))


@triton.jit
def multiply_part(
    q, own, k_cache_ptr, v_cache_ptr, path_ptr, begin, stop, n, end, is_tree_part, S, scale, softcap, window, recent,
    d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    SINKS: tl.constexpr, CAP: tl.constexpr, Q8: tl.constexpr,
):  # fmt: skip
    """Return maximum, total and weighted values of slots from `begin` to `stop`, for queries [ROWS, D].

    Scores are logarithms of base 2; `scale` and `softcap` make them so. `path_ptr`: of the token of a tree's part.
    """
    i = tl.arange(0, D)
    limit = recent_from(own, recent, CHUNK)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    values = tl.zeros((ROWS, D), tl.float32)
    for start in range(begin, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        gathered = (at >= n) & (at < end) & is_tree_part
        step = tl.load(path_ptr + (at - n), mask=gathered, other=0).to(tl.int32)
        slot = tl.where(gathered, n + step, at)
        is_valid = (at < end) & (slot < S)
        if Q8:
            k = load_q8(k_cache_ptr, slot, is_valid, d, D).to(q.dtype)
            v = load_q8(v_cache_ptr, slot, is_valid, d, D).to(q.dtype)
        else:
            where = slot[:, None] * d + i[None, :]
            k = tl.load(k_cache_ptr + where, mask=is_valid[:, None] & (i < d)[None, :], other=0.0)
            v = tl.load(v_cache_ptr + where, mask=is_valid[:, None] & (i < d)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAP:
            scores = softcap - 2 * softcap / (tl.exp(scores) + 1)  # softcap * tanh(score / softcap)
        seen = (at[None, :] <= own[:, None]) & (at[None, :] > own[:, None] - window)
        seen = seen & ((at[None, :] >= limit[:, None]) | (at < SINKS)[None, :])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        values = values * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    return top, total, values


@triton.jit
def join_rows(
    query, own, is_live, low, high, top_ptr, total_ptr, part_ptr, sink, X, window, recent,
    NUM: tl.constexpr, d: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attention [NUM, D] of queries at positions `own`, from `low` to `high`, by their parts; 0 without any.

    Parts are added one by one, in order, and each number by itself. So bits depend on neither NUM, AT_ONCE, the other
    queries, nor on how numbers lie in registers. Parts that a query does not see are not read for it. `sink`: one more
    score of each query [NUM], of base e, which has no value and is added last; None: there is none.
    """
    i = tl.arange(0, D)
    top = tl.full((NUM,), float("-inf"), tl.float32)
    total = tl.zeros((NUM,), tl.float32)
    values = tl.zeros((NUM, D), tl.float32)
    first = tl.maximum(low + 1 - window, 0) // (SPLIT * GROUP) * GROUP
    end = tl.minimum(high // SPLIT + 1, X)
    is_valid = is_live[:, None] & (i < d)[None, :]
    for group in range(first, end, GROUP):
        part = group + tl.arange(0, GROUP)[None, :]
        seen = is_seen(part, own[:, None], own[:, None] + 1, window, recent, SPLIT, CHUNK, SINKS)
        seen = seen & (part < X) & is_live[:, None]
        # What other programs wrote is read past the first level of cache.
        tops = tl.load(top_ptr + query[:, None] * X + part, mask=seen, other=float("-inf"), cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        total = total * shrink
        values = values * shrink[:, None]
        for step in range(group, tl.minimum(group + GROUP, end), AT_ONCE):
            # All loads come before the first use, and no mask is kept for each: so they are in flight together.
            # What is read of a part that a query does not see is of no use, and may be anything.
            read = ()
            for ahead in tl.static_range(AT_ONCE):
                at = query * X + tl.minimum(step + ahead, end - 1)
                here = tl.load(top_ptr + at, mask=is_live, other=0.0, cache_modifier=".cg")
                added = tl.load(total_ptr + at, mask=is_live, other=0.0, cache_modifier=".cg")
                some_ptr = part_ptr + at[:, None] * d + i[None, :]
                some = tl.load(some_ptr, mask=is_valid, other=0.0, cache_modifier=".cg")
                read += ((here, added, some),)  # type: ignore[assignment]
            for ahead in tl.static_range(AT_ONCE):
                here, added, some = read[ahead]
                one = step + ahead
                sees = is_seen(one, own, own + 1, window, recent, SPLIT, CHUNK, SINKS) & (one < X) & is_live
                weight = tl.exp2(here - base)
                total = tl.where(sees, total + added * weight, total)
                values = tl.where(sees[:, None], values + some * weight[:, None], values)
        top = new_top
    if sink is not None:
        total = tl.where(top == float("-inf"), total, total + tl.exp2(sink * 1.4426950408889634 - top))
    return values / tl.where(total == 0, 1.0, total)[:, None]
