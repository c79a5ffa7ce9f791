"""Attention of a decode step in one launch: norms, rotary embedding, KV write, parts and their join.

For the T * G queries of a key/value head that fit one tile, in chains. Each number has the bits of the three launches
of `compile.cuda.attention`, which share their arithmetic with this one (`attention_parts`, `kv_write.turned_heads`).

Programs of a head need nothing of each other until their parts are joined:

- Each turns all queries of the head itself. A new token's key and value are turned, written and, past a barrier of the
  program, read back from the cache by the one program that has its part. No other program reads these slots.
- Parts are joined by the program that arrives last, in order. It may be any: which one, and when, no bit depends on.

What makes the join see all parts, in the terms of PTX's memory model: the stores of a program's threads come before
its barrier, and the barrier before the atomic addition of its one thread, which releases them at the scope of the GPU.
Additions to one counter form a chain, so the last one, which acquires, comes after every program's release, and past
the broadcast of its result (a barrier, too) so do the loads of all threads of that program. They bypass the first level
of cache (.cg). No program waits for another one, so none has to be resident for another's sake.

Counters are 0 between launches. The last program writes the 0: all others have arrived, and none looks at it again.
Past their waits (`pdl`) the kernels behind come after the end of this launch, and so after that write, in replays of a
graph, too. Each cache has counters of its own, since its steps alone are in one order: those of another model may run
at the same time, on another stream.

Legend as in `compile.cuda.attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile.cuda.attention_parts import INTS, UNALIGNED, is_seen, join_rows, multiply_part
from compile.cuda.dependent_launch import wait_for_predecessor
from compile.cuda.kv_write import known_position, turned_heads

MAX_HEADS = 4096
"""Most key/value heads of all rows of a batch together: counters of a cache."""
AT_ONCE = 8
"""Parts whose loads are in flight in the join."""
REGISTERS = 168
"""Registers of a thread, so that three programs fit a processor; left to itself, the compiler spills some."""
_arrivals: dict[tuple[torch.device, int], Tensor] = {}
_STRIDES = ["q_b", "q_t", "k_b", "k_t", "v_b", "v_t"]


@triton.jit(do_not_specialize=[*INTS, "N", *_STRIDES], do_not_specialize_on_alignment=UNALIGNED)
def attend_step(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,  # [N, R]
    sin_ptr,
    factor_ptr,  # [N] or None
    q_norm_ptr,  # [d] or None
    k_norm_ptr,
    k_cache_ptr,
    v_cache_ptr,
    length_ptr,
    counters_ptr,  # int32 [B * K], zero before and after
    top_ptr,
    total_ptr,
    part_ptr,
    sink_ptr,  # [H] or None
    out_ptr,
    T,
    S,
    X,
    N,
    num_programs,
    q_b,  # strides, in heads: so compilers see that rows are aligned
    q_t,
    k_b,
    k_t,
    v_b,
    v_t,
    eps,
    scale,
    softcap,
    window,
    recent,
    K: tl.constexpr,
    G: tl.constexpr,
    d: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    GEMMA: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    JOIN: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    CAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend for one key/value head. Grid (num_programs, B * K); each program takes every so-many-th part.

    T * G is at most ROWS, and T at most SPLIT. JOIN: queries joined at once.
    """
    wait_for_predecessor(PDL)
    program, head = tl.program_id(0), tl.program_id(1)
    b, kv = (head // K).to(tl.int64), head % K
    n = tl.load(length_ptr + b).to(tl.int32)
    end = n + T
    # Padding may exceed the cache. An idle row's first program has the zeros to write.
    num_parts = tl.where(n < 0, 0, tl.minimum((end + SPLIT - 1) // SPLIT, X))
    workers = tl.maximum(tl.minimum(num_programs, num_parts), 1)
    if program < workers:
        i, row = tl.arange(0, D), tl.arange(0, ROWS)
        t, g = row // G, row % G
        live, own = t < T, n + t
        source_ptr = q_ptr + (b * q_b + t * q_t + kv * G + g) * d
        q = turned_heads(source_ptr, live, own, q_norm_ptr, cos_ptr, sin_ptr, N, eps, ROWS, d, D, R, GEMMA)
        if factor_ptr is not None:
            factor = tl.load(factor_ptr + known_position(own, N)).to(tl.float32)
            q = (q.to(tl.float32) * factor[:, None]).to(q.dtype)
        k_cache_ptr += (b * K + kv) * S * d
        v_cache_ptr += (b * K + kv) * S * d
        if (n // SPLIT % workers == program) | ((end - 1) // SPLIT % workers == program):
            slot = n + row
            writes = (row < T) & (n >= 0) & (slot < S) & (slot // SPLIT % workers == program)
            source_ptr = k_ptr + (b * k_b + row * k_t + kv) * d
            k = turned_heads(source_ptr, writes, slot, k_norm_ptr, cos_ptr, sin_ptr, N, eps, ROWS, d, D, R, GEMMA)
            is_written = writes[:, None] & (i < d)[None, :]
            source_ptr = v_ptr + (b * v_b + row * v_t + kv) * d
            v = tl.load(source_ptr[:, None] + i[None, :], mask=is_written, other=0.0)
            tl.store(k_cache_ptr + slot[:, None] * d + i[None, :], k, mask=is_written)
            tl.store(v_cache_ptr + slot[:, None] * d + i[None, :], v, mask=is_written)
            tl.debug_barrier()  # the loop below reads them
        query = (b * T + t) * (K * G) + kv * G + g
        for part in range(program, num_parts, workers):
            begin = part * SPLIT
            seen_by_some = is_seen(part, n, end, window, recent, SPLIT, CHUNK, SINKS)
            top, total, values = multiply_part(
                q, own, k_cache_ptr, v_cache_ptr, length_ptr, begin,
                tl.where(seen_by_some, tl.minimum(begin + SPLIT, end), begin), n, end, False, S, scale, softcap,
                window, recent, d, D, ROWS, BLOCK, CHUNK, SINKS, CAP, False,
            )  # fmt: skip
            out = query * X + part
            stored = live & seen_by_some
            tl.store(top_ptr + out, top, mask=stored)
            tl.store(total_ptr + out, total, mask=stored)
            tl.store(part_ptr + out[:, None] * d + i[None, :], values, mask=stored[:, None] & (i < d)[None, :])
        tl.debug_barrier()  # all of this program's stores come before its arrival
        arrived = workers - 1
        if workers > 1:
            arrived = tl.atomic_add(counters_ptr + head, 1, sem="acq_rel", scope="gpu")
        if arrived == workers - 1:
            tl.store(counters_ptr + head, 0)
            for first in range(0, T * G, JOIN):
                _join_queries(
                    first, top_ptr, total_ptr, part_ptr, sink_ptr, out_ptr, b, kv, n, T, X, window, recent,
                    K, G, JOIN, d, D, GROUP, AT_ONCE, SPLIT, CHUNK, SINKS,
                )  # fmt: skip


@triton.jit
def _join_queries(
    first, top_ptr, total_ptr, part_ptr, sink_ptr, out_ptr, b, kv, n, T, X, window, recent,
    K: tl.constexpr, G: tl.constexpr, JOIN: tl.constexpr, d: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Join and store JOIN queries of a key/value head, those from (t, g) number `first` on."""
    row, i = first + tl.arange(0, JOIN), tl.arange(0, D)
    t, g = row // G, row % G
    live = t < T
    query = (b * T + t) * (K * G) + kv * G + g
    high = n + tl.minimum((first + JOIN - 1) // G, T - 1)
    sink = None
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + kv * G + g).to(tl.float32)
    joined = join_rows(
        query, n + t, live & (n >= 0), n + first // G, high, top_ptr, total_ptr, part_ptr, sink, X, window, recent,
        JOIN, d, D, GROUP, AT_ONCE, SPLIT, CHUNK, SINKS,
    )  # fmt: skip
    out = out_ptr + query[:, None] * d + i[None, :]
    tl.store(out, joined.to(out_ptr.dtype.element_ty), mask=live[:, None] & (i < d)[None, :])


def arrivals(lengths_B: Tensor) -> Tensor:
    """Return the counters of the cache that has these lengths, or rows of them.

    They are made in its first step, before any capture. A cache that takes the memory of another's lengths takes its
    counters, too.
    """
    place = lengths_B.device, lengths_B.untyped_storage().data_ptr()
    if place not in _arrivals:
        assert not (lengths_B.is_cuda and torch.cuda.is_current_stream_capturing()), "lengths made in a capture"
        _arrivals[place] = torch.zeros(MAX_HEADS, dtype=torch.int32, device=lengths_B.device)
    return _arrivals[place]


def queries_at_once(G: int) -> int:
    """Return JOIN: the queries of a token."""
    return max(4, triton.next_power_of_2(G))
