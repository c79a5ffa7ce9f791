"""Attention over live slots in Triton, batch invariant in chains and trees.

Three launches: `write_new_kv` (norms and rotary embedding of new queries and keys; new keys and values into the cache),
`attend_parts` (SPLIT slots each), `join_parts` (parts in order). Steps of few queries do all of it in one launch
(`attention_step`), with the same bits; trees, caches of 8 bits and wide steps take three. Parts begin at absolute
multiples of SPLIT, blocks within them at multiples of BLOCK, and a tile of queries has a constant number of rows: T, S,
B and the length change which programs have work, and never the sums of a query's row. If slots of a part hold new rows
of a tree, each row has a program of its own, which gathers its path into the order of plain decoding. A row of the
batch with a length below 0 is idle: nothing of it is read or written, and its output is 0.

Legend: B rows of the batch, T new tokens, H query heads, K key/value heads, G = H / K, S slots, P slots that a path may
name, d head size, D the power of two above it, R rotated half, N positions that have an angle, X parts.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile.cuda.attention_parts import (
    GROUP,
    INTS,
    NO_WINDOW,
    ROWS,
    SPLIT,
    UNALIGNED,
    is_seen,
    join_rows,
    multiply_part,
)
from compile.cuda.attention_step import AT_ONCE, MAX_HEADS, REGISTERS, arrivals, attend_step, queries_at_once
from compile.cuda.dependent_launch import wait_for_predecessor
from compile.cuda.gemm_config import device
from compile.cuda.kv_q8 import head_q8, num_cache_slots, power_above
from compile.cuda.kv_write import angles, write_new_kv
from compile.cuda.pdl import attention_options, with_room
from compile.kv_layout import CHUNK, SINKS

STAGES = 5
"""Stages of the loop: slot numbers, keys, values, and two of prefetch."""
PROGRAMS_PER_SM = 2
"""Programs resident on a multiprocessor: 32 KB each use its bandwidth."""


@triton.jit(do_not_specialize=INTS, do_not_specialize_on_alignment=UNALIGNED)
def attend_parts(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    length_ptr,
    depth_ptr,
    path_ptr,
    top_ptr,
    total_ptr,
    part_ptr,
    T,
    S,
    P,
    X,
    num_programs,
    scale,
    softcap,
    window,
    recent,
    K: tl.constexpr,
    G: tl.constexpr,
    d: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    CAP: tl.constexpr,
    Q8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a part's maximum, total and weighted values for ROWS queries.

    The queries are those of a key/value head. Grid (programs, B * K), see `count_programs`. Each of the first programs
    takes a tile of queries, those of (t, g) in order, and every `num_programs`-th part. In trees these hold old slots
    alone; further programs have a part with new rows each, for one token. Scores are logarithms of base 2; `scale` and
    `softcap` make them so.
    """
    wait_for_predecessor(PDL)
    program = tl.program_id(0)
    b, kv = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K
    n = tl.load(length_ptr + b).to(tl.int32)
    row = tl.arange(0, ROWS)
    tiles = (T * G + ROWS - 1) // ROWS
    tile, first_part = program % tiles, program // tiles
    t, g = (tile * ROWS + row) // G, (tile * ROWS + row) % G
    live = t < T
    first, end = n, n + T  # position of the tile's first query; end of those of all
    end_part = tl.where(P > 0, n // SPLIT, (end + SPLIT - 1) // SPLIT)
    is_tree_part = program >= tiles * num_programs
    token = 0
    if is_tree_part:
        TILES: tl.constexpr = (G + ROWS - 1) // ROWS
        program -= tiles * num_programs
        token = program // TILES % T
        first_part = n // SPLIT + program // (TILES * T)
        end_part = first_part + 1
        t, g = token + row * 0, program % TILES * ROWS + row
        live = g < G
        first += tl.load(depth_ptr + b * T + token).to(tl.int32)
        end = first + 1
    own = n + tl.where(P > 0, tl.load(depth_ptr + b * T + t, mask=live & (P > 0), other=0).to(tl.int32), t)
    i = tl.arange(0, D)
    query = (b * T + t) * (K * G) + kv * G + g
    q = tl.load(q_ptr + query[:, None] * d + i[None, :], mask=live[:, None] & (i < d)[None, :], other=0.0)
    if Q8:
        k_cache_ptr, v_cache_ptr = head_q8(k_cache_ptr, b * K + kv, S, d), head_q8(v_cache_ptr, b * K + kv, S, d)
    else:
        k_cache_ptr += (b * K + kv) * S * d
        v_cache_ptr += (b * K + kv) * S * d
    for part in range(first_part, tl.minimum(end_part, X), num_programs):  # padding may exceed the cache
        begin = part * SPLIT
        seen_by_some = (n >= 0) & is_seen(part, first, end, window, recent, SPLIT, CHUNK, SINKS)
        top, total, values = multiply_part(
            q, own, k_cache_ptr, v_cache_ptr, path_ptr + (b * T + token) * P, begin,
            tl.where(seen_by_some, tl.minimum(begin + SPLIT, end), begin), n, end, is_tree_part, S, scale, softcap,
            window, recent, d, D, ROWS, BLOCK, CHUNK, SINKS, CAP, Q8,
        )  # fmt: skip
        out = query * X + part
        stored = live & seen_by_some
        tl.store(top_ptr + out, top, mask=stored)
        tl.store(total_ptr + out, total, mask=stored)
        tl.store(part_ptr + out[:, None] * d + i[None, :], values, mask=stored[:, None] & (i < d)[None, :])


@triton.jit(do_not_specialize=INTS, do_not_specialize_on_alignment=UNALIGNED)
def join_parts(
    length_ptr,
    depth_ptr,
    top_ptr,
    total_ptr,
    part_ptr,
    sink_ptr,  # [H] or None
    out_ptr,
    T,
    P,
    X,
    window,
    recent,
    H: tl.constexpr,
    d: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join a query's parts in order.

    Grid (B * T, H).
    """
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    query = token * H + tl.program_id(1)
    n = tl.load(length_ptr + token // T).to(tl.int32)
    own = n
    if P > 0:
        own += tl.load(depth_ptr + token).to(tl.int32)
    else:
        own += (token % T).to(tl.int32)
    one, i = tl.arange(0, 1), tl.arange(0, D)
    sink = None
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + tl.program_id(1) + one).to(tl.float32)
    out_1D = join_rows(
        query + one, own + one, n + one >= 0, own, own, top_ptr, total_ptr, part_ptr, sink, X, window, recent,
        1, d, D, GROUP, GROUP, SPLIT, CHUNK, SINKS,
    )  # fmt: skip
    tl.store(out_ptr + query * d + i, tl.reshape(out_1D, (D,)).to(out_ptr.dtype.element_ty), mask=i < d)


def attend_live(
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    cos_Nr: Tensor | None,
    sin_Nr: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths_B: Tensor,
    depth_BT: Tensor | None,
    path_BTP: Tensor | None,
    scale: float,
    window: int,
    recent: int,
    softcap: float,
    q_norm_d: Tensor | None = None,
    k_norm_d: Tensor | None = None,
    eps: float = 0.0,
    gemma: bool = False,
    *,
    query_factors: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run `compile.attention.attend` with its norms, rotary embedding, factors of queries and sinks: [B, T, H, d].

    Tensors of bfloat16, float16 or float32 on a GPU, or on a CPU under Triton's interpreter. Caches are [B, K, S, d],
    or in 8 bits.
    """
    B, T, H, d = q_BTHd.shape
    q, k, v = (x if _has_rows(x) else x.contiguous() for x in (q_BTHd, k_BTKd, v_BTKd))
    K, S, q8 = k_cache.shape[1], num_cache_slots(k_cache), k_cache.dtype == torch.int8
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "make caches with new_kv"
    D, X = power_above(d, q8=q8), triton.cdiv(S, SPLIT)
    depth, path, P = lengths_B, lengths_B, 0  # chains: neither is read
    if depth_BT is not None and path_BTP is not None:
        depth, path, P = depth_BT.contiguous(), path_BTP.contiguous(), path_BTP.shape[2]
    launch = attention_options(q.device)
    G = H // K
    BLOCK = slots_per_block(D, q.dtype)
    processors = device(q.device.index if q.is_cuda else None).processors
    programs, num_programs = count_programs(T, G, P > 0, X, B * K, processors)
    top, total = (q.new_empty((B * T * H, X), dtype=torch.float32) for _ in range(2))
    part = q.new_empty((B * T * H, X, d), dtype=torch.float32)
    log2e = math.log2(math.e)
    units = (2 * scale / softcap, softcap * log2e) if softcap else (scale * log2e, 0.0)
    extent = {"SPLIT": SPLIT, "CHUNK": CHUNK, "SINKS": SINKS}
    back = (window or NO_WINDOW, recent or NO_WINDOW)
    size = {"d": d, "D": D, **extent}
    loop = {"K": K, "G": G, "ROWS": ROWS, "BLOCK": BLOCK, "CAP": softcap != 0}
    how = {**launch, "num_warps": 4, "enable_fp_fusion": False}
    if runs_at_once(q, k_cache, P):
        cos, sin, N, R = angles(q, cos_Nr, sin_Nr, query_factors)
        out = q.new_empty((B, T, H, d))
        at_once = partial(
            attend_step[(num_programs, B * K)],
            *(q, k, v, cos, sin, query_factors, q_norm_d, k_norm_d, k_cache, v_cache, lengths_B, arrivals(lengths_B)),
            *(top, total, part, sinks, out, T, S, X, N, num_programs),
            *(stride // d for x in (q, k, v) for stride in x.stride()[:2]),
            *(eps, *units, *back),
            **{"R": R, "GEMMA": gemma, "GROUP": GROUP, "AT_ONCE": AT_ONCE, "JOIN": queries_at_once(G)},
            **size,
            **loop,
            **how,
            maxnreg=REGISTERS,
        )
        with_room(lambda stages: at_once(num_stages=stages), STAGES - 2, (q.device, "attend_step", d, q.dtype))
        return out
    norms, caches = (q_norm_d, k_norm_d, eps, gemma), (k_cache, v_cache)
    turned = write_new_kv(q, k, v, cos_Nr, sin_Nr, *caches, lengths_B, depth, path, P, norms, query_factors)
    in_parts = partial(
        attend_parts[(programs, B * K)],
        *(turned, k_cache, v_cache, lengths_B, depth, path, top, total, part),
        *(T, S, P, X, num_programs, *units, *back),
        **{"Q8": q8},
        **size,
        **loop,
        **how,
    )
    with_room(lambda stages: in_parts(num_stages=stages), STAGES, (q.device, "attend_parts", d, q.dtype, q8))
    out = torch.empty_like(turned)
    join_parts[(B * T, H)](
        *(lengths_B, depth, top, total, part, sinks, out),
        *(T, P, X, *back),
        **{"H": H, "GROUP": GROUP},
        **size,
        **how,
    )
    return out


def runs_at_once(q_BTHd: Tensor, k_cache: Tensor, P: int) -> bool:
    """Return True if a step's attention is one launch; its bits are the same."""
    (B, T, H, _), K = q_BTHd.shape, k_cache.shape[1]
    return P == 0 and k_cache.dtype != torch.int8 and T * (H // K) <= ROWS and B * K <= MAX_HEADS


def _has_rows(x_BTHd: Tensor) -> bool:
    """Return True if heads of a token follow each other, and tokens are whole heads apart."""
    d = x_BTHd.shape[3]
    return x_BTHd.stride()[2:] == (d, 1) and all(stride % d == 0 for stride in x_BTHd.stride()[:2])


def count_programs(T: int, G: int, tree: bool, X: int, heads: int, processors: int) -> tuple[int, int]:
    """Count programs of a key/value head, and those of a tile's parts.

    All `heads` together fill the GPU once, however long the cache. New rows of a tree have further programs, one or
    more each.
    """
    tiles = triton.cdiv(T * G, ROWS)
    num_programs = max(1, min(X, PROGRAMS_PER_SM * processors // (tiles * heads)))
    num_tree_programs = T * triton.cdiv(G, ROWS) * (triton.cdiv(T - 1, SPLIT) + 1) if tree else 0
    return tiles * num_programs + num_tree_programs, num_programs


def slots_per_block(D: int, dtype: torch.dtype) -> int:
    """Return slots multiplied at once, which bits of a model depend on."""
    return 16 if D * dtype.itemsize >= 1024 else 64 if D <= 64 else 32
