"""Attention over live slots in Triton: a query's bits depend on its own prefix only, in chains and in trees.

Three launches: turn and write (norms and rotary embedding of new queries and keys; new keys and values into the
cache), parts (each SPLIT slots by themselves), join (parts in order). Parts lie at absolute multiples of SPLIT, blocks
within them at multiples of BLOCK, and a tile of queries has a constant number of rows: so T, S, B and the length change
which programs have work, and never the sums that a query's row is made of. Where the slots of a part hold new rows of a
tree, each row has a program of its own, which gathers its path into the order of plain decoding. A row of the batch
whose length is below 0 takes no part: nothing of it is read or written, and its output is 0.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compile.cuda.gemm_config import device
from compile.cuda.pdl import launch_options, with_room
from compile.sight import CHUNK, SINKS

ROWS = 16
"""Queries of a tile. Bits depend on it, as on SPLIT."""
SPLIT = 128
"""Slots of a part."""
STAGES = 5
"""Stages of the loop over slots: one each for places, keys and values, and two more for the next block's."""
RESIDENT = 2
"""Programs that every processor holds at once; with 32 KB each in flight they are enough for its share of bandwidth."""
GROUP = 32
"""Parts that the join sums up together."""
FAR = 1 << 30
"""A window that sees everything."""
# One binary serves all steps: what differs between them must not make another.
_PLACES = ["length_ptr", "depth_ptr", "path_ptr"]
_INTS = ["T", "S", "P", "X", "N", "turns", "window", "recent", "q_b", "q_t", "k_b", "k_t", "v_b", "v_t"]


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_PLACES)
def turn_and_write(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,  # [N, R]
    sin_ptr,
    q_norm_ptr,  # [d] or None
    k_norm_ptr,
    k_cache_ptr,
    v_cache_ptr,
    length_ptr,
    depth_ptr,
    path_ptr,
    out_ptr,
    T,
    S,
    P,
    N,
    q_b,
    q_t,
    k_b,
    k_t,
    v_b,
    v_t,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    d: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    GEMMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one new token. Grid (B * T, H + 2K). R = 0: nothing is turned. Rounds as the plain composition."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token, head = tl.program_id(0), tl.program_id(1)
    b, t = (token // T).to(tl.int64), token % T
    place, ahead = t, t
    if P > 0:
        depth = tl.load(depth_ptr + token)
        place = tl.load(path_ptr + token.to(tl.int64) * P + depth).to(tl.int32)
        ahead = depth.to(tl.int32)
    length = tl.load(length_ptr + b)
    slot = length + place
    writes = (slot >= 0) & (slot < S)  # rows of padding may lie behind the cache
    if head < H:
        source, target = q_ptr + b * q_b + t * q_t + head * d, out_ptr + (token.to(tl.int64) * H + head) * d
        writes = slot >= 0
    elif head < H + K:
        source = k_ptr + b * k_b + t * k_t + (head - H) * d
        target = k_cache_ptr + ((b * K + head - H) * S + slot) * d
    else:
        source = v_ptr + b * v_b + t * v_t + (head - H - K) * d
        target = v_cache_ptr + ((b * K + head - H - K) * S + slot) * d
    i = tl.arange(0, D)
    x = tl.load(source + i, mask=i < d, other=0.0)
    if head < H + K:
        root = 0.0
        if q_norm_ptr is not None:
            wide = x.to(tl.float32)
            root = tl.rsqrt(tl.sum(wide * wide, 0) / d + eps)
            x = _normalised(x, root, q_norm_ptr, k_norm_ptr, head < H, i, i < d, GEMMA)
        if R > 0:
            turned = i < 2 * R
            across = tl.where(i < R, i + R, i - R)
            other = tl.load(source + across, mask=turned, other=0.0)
            if q_norm_ptr is not None:
                other = _normalised(other, root, q_norm_ptr, k_norm_ptr, head < H, across, turned, GEMMA)
            angle = tl.maximum(tl.minimum(length + ahead, N - 1), 0) * R + tl.where(i < R, i, i - R)
            cos = tl.load(cos_ptr + angle, mask=turned, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr + angle, mask=turned, other=0.0).to(tl.float32)
            straight = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
            crossed = (other.to(tl.float32) * sin).to(x.dtype).to(tl.float32)
            y = tl.where(i < R, straight - crossed, straight + crossed)
            x = tl.where(turned, y.to(x.dtype), x)
    tl.store(target + i, x, mask=(i < d) & writes)


@triton.jit
def _normalised(x, root, q_norm_ptr, k_norm_ptr, is_query, at, there, GEMMA: tl.constexpr):
    """Entries `at` of a head, times the reciprocal of its root mean square, times their weights."""
    weight = tl.load(tl.where(is_query, q_norm_ptr, k_norm_ptr) + at, mask=there, other=0.0).to(tl.float32)
    wide = x.to(tl.float32) * root
    if GEMMA:
        return (wide * weight).to(x.dtype)
    return (wide.to(x.dtype).to(tl.float32) * weight).to(x.dtype)


@triton.jit
def _recent_from(own, recent, CHUNK: tl.constexpr):
    """The first of the recent positions that a query at position `own` sees."""
    return tl.maximum(own + 1 - recent, 0) // CHUNK * CHUNK


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_PLACES)
def parts(
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
    turns,
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
    PDL: tl.constexpr,
):
    """Softmax over parts for ROWS queries of a key/value head: the largest score, the total, the weighted values.

    Grid (programs, B * K), see `programs_of`. Of the first ones each takes a tile of queries, those of (t, g) in
    order, and every `turns`-th part. In trees these hold old slots alone, and further programs have a part with new
    rows each, for one token. Scores are logarithms of base 2; `scale` and `softcap` make them so.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    b, kv = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K
    n = tl.load(length_ptr + b).to(tl.int32)
    row = tl.arange(0, ROWS)
    tiles = (T * G + ROWS - 1) // ROWS
    tile, first_part = program % tiles, program // tiles
    t, g = (tile * ROWS + row) // G, (tile * ROWS + row) % G
    live = t < T
    first, end = n, n + T  # position of the tile's first query; behind those of all
    behind_part = tl.where(P > 0, n // SPLIT, (end + SPLIT - 1) // SPLIT)
    alone = program >= tiles * turns
    token = 0
    if alone:
        TILES: tl.constexpr = (G + ROWS - 1) // ROWS
        program -= tiles * turns
        token = program // TILES % T
        first_part = n // SPLIT + program // (TILES * T)
        behind_part = first_part + 1
        t, g = token + row * 0, program % TILES * ROWS + row
        live = g < G
        first += tl.load(depth_ptr + b * T + token).to(tl.int32)
        end = first + 1
    own = n + tl.where(P > 0, tl.load(depth_ptr + b * T + t, mask=live & (P > 0), other=0).to(tl.int32), t)
    recent_from = _recent_from(own, recent, CHUNK)
    i = tl.arange(0, D)
    query = (b * T + t) * (K * G) + kv * G + g
    q = tl.load(q_ptr + query[:, None] * d + i[None, :], mask=live[:, None] & (i < d)[None, :], other=0.0)
    k_cache_ptr += (b * K + kv) * S * d
    v_cache_ptr += (b * K + kv) * S * d
    for part in range(first_part, tl.minimum(behind_part, X), turns):  # rows of padding may lie behind the cache
        begin = part * SPLIT
        behind = begin + SPLIT
        seen_by_some = (n >= 0) & (begin < end) & (behind > first + 1 - window)
        seen_by_some = seen_by_some & ((begin < SINKS) | (behind > _recent_from(first, recent, CHUNK)))
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        values = tl.zeros((ROWS, D), tl.float32)
        for start in range(begin, tl.where(seen_by_some, tl.minimum(behind, end), begin), BLOCK):
            at = start + tl.arange(0, BLOCK)
            gathered = (at >= n) & (at < end) & alone
            step = tl.load(path_ptr + (b * T + token) * P + (at - n), mask=gathered, other=0).to(tl.int32)
            slot = tl.where(gathered, n + step, at)
            there = ((at < end) & (slot < S))[:, None] & (i < d)[None, :]
            where = slot[:, None] * d + i[None, :]
            k = tl.load(k_cache_ptr + where, mask=there, other=0.0)
            v = tl.load(v_cache_ptr + where, mask=there, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if CAP:
                scores = softcap - 2 * softcap / (tl.exp(scores) + 1)  # softcap * tanh(score / softcap)
            seen = (at[None, :] <= own[:, None]) & (at[None, :] > own[:, None] - window)
            seen = seen & ((at[None, :] >= recent_from[:, None]) | (at < SINKS)[None, :])
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(weights, 1)
            values = values * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            top = new_top
        out = query * X + part
        told = live & seen_by_some
        tl.store(top_ptr + out, top, mask=told)
        tl.store(total_ptr + out, total, mask=told)
        tl.store(part_ptr + out[:, None] * d + i[None, :], values, mask=told[:, None] & (i < d)[None, :])


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_PLACES)
def join(
    length_ptr,
    depth_ptr,
    top_ptr,
    total_ptr,
    part_ptr,
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
    """The parts of one query that it sees, in order, GROUP by GROUP. Grid (B * T, H)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    query = token * H + tl.program_id(1)
    own = tl.load(length_ptr + token // T).to(tl.int32)
    if P > 0:
        own += tl.load(depth_ptr + token).to(tl.int32)
    else:
        own += (token % T).to(tl.int32)
    recent_from = _recent_from(own, recent, CHUNK)
    i = tl.arange(0, D)
    top = float("-inf")
    total = 0.0
    values = tl.zeros((D,), tl.float32)
    first = tl.maximum(own + 1 - window, 0) // (SPLIT * GROUP) * GROUP
    for group in range(first, tl.minimum(own // SPLIT + 1, X), GROUP):
        part = group + tl.arange(0, GROUP)
        begin = part * SPLIT
        behind = begin + SPLIT
        seen = (part < X) & (begin <= own) & (behind > own + 1 - window) & ((behind > recent_from) | (begin < SINKS))
        at = query * X + part
        tops = tl.load(top_ptr + at, mask=seen, other=float("-inf"))
        totals = tl.load(total_ptr + at, mask=seen, other=0.0)
        some = tl.load(part_ptr + at[:, None] * d + i[None, :], mask=seen[:, None] & (i < d)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tops - base)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(totals * weights, 0)
        values = values * shrink + tl.sum(some * weights[:, None], 0)
        top = new_top
    total = tl.where(total == 0, 1.0, total)  # of a row that takes no part
    tl.store(out_ptr + query * d + i, (values / total).to(out_ptr.dtype.element_ty), mask=i < d)


def attend_live(
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    cos_Nr: Tensor | None,
    sin_Nr: Tensor | None,
    k_cache_BKSd: Tensor,
    v_cache_BKSd: Tensor,
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
) -> Tensor:
    """`compile.attention.attend`, with the norms and the rotary embedding where they are given: [B, T, H, d].

    Tensors of bfloat16, float16 or float32 on a GPU, or on a CPU under Triton's interpreter.
    """
    B, T, H, d = q_BTHd.shape
    q, k, v = (x if x.stride()[2:] == (d, 1) else x.contiguous() for x in (q_BTHd, k_BTKd, v_BTKd))
    K, S = k_cache_BKSd.shape[1:3]
    assert k_cache_BKSd.is_contiguous() and v_cache_BKSd.is_contiguous(), "make caches with new_kv"
    D, X = max(16, triton.next_power_of_2(d)), triton.cdiv(S, SPLIT)
    depth, path, P = lengths_B, lengths_B, 0  # chains: neither is read
    if depth_BT is not None and path_BTP is not None:
        depth, path, P = depth_BT.contiguous(), path_BTP.contiguous(), path_BTP.shape[2]
    turned = q.new_empty((B, T, H, d))
    cos, sin, N, R = turned, turned, 0, 0
    if cos_Nr is not None and sin_Nr is not None:
        cos, sin, (N, R) = cos_Nr.contiguous(), sin_Nr.contiguous(), cos_Nr.shape
    launch = launch_options(q.device)
    turn_and_write[(B * T, H + 2 * K)](
        *(q, k, v, cos, sin, q_norm_d, k_norm_d, k_cache_BKSd, v_cache_BKSd, lengths_B, depth, path, turned),
        *(T, S, P, N, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], eps),
        **{"H": H, "K": K, "d": d, "D": D, "R": R, "GEMMA": gemma},
        **launch,
        num_warps=1,
        enable_fp_fusion=False,
    )
    G = H // K
    BLOCK = block_of(D, q.dtype)
    programs, turns = programs_of(T, G, P > 0, X, B * K, device(q.device.index if q.is_cuda else None).processors)
    top, total = (q.new_empty((B * T * H, X), dtype=torch.float32) for _ in range(2))
    part = q.new_empty((B * T * H, X, d), dtype=torch.float32)
    log2e = math.log2(math.e)
    units = (2 * scale / softcap, softcap * log2e) if softcap else (scale * log2e, 0.0)
    sight = {"SPLIT": SPLIT, "CHUNK": CHUNK, "SINKS": SINKS}
    back = (window or FAR, recent or FAR)
    in_parts = partial(
        parts[(programs, B * K)],
        *(turned, k_cache_BKSd, v_cache_BKSd, lengths_B, depth, path, top, total, part),
        *(T, S, P, X, turns, *units, *back),
        **{"K": K, "G": G, "d": d, "D": D, "ROWS": ROWS, "BLOCK": BLOCK, "CAP": softcap != 0},
        **sight,
        **launch,
        num_warps=4,
        enable_fp_fusion=False,
    )
    with_room(lambda stages: in_parts(num_stages=stages), STAGES, (q.device, "parts", d, q.dtype))
    out = torch.empty_like(turned)
    join[(B * T, H)](
        *(lengths_B, depth, top, total, part, out),
        *(T, P, X, *back),
        **{"H": H, "d": d, "D": D, "GROUP": GROUP},
        **sight,
        **launch,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def programs_of(T: int, G: int, tree: bool, X: int, heads: int, processors: int) -> tuple[int, int]:
    """Programs of a key/value head, of `heads` in all, and how many of them share the parts of a tile of queries.

    Together they are what the GPU runs at once, however long the cache. Where new rows of a tree lie, each row has
    programs of its own.
    """
    tiles = triton.cdiv(T * G, ROWS)
    turns = max(1, min(X, RESIDENT * processors // (tiles * heads)))
    alone = T * triton.cdiv(G, ROWS) * (triton.cdiv(T - 1, SPLIT) + 1) if tree else 0
    return tiles * turns + alone, turns


def block_of(D: int, dtype: torch.dtype) -> int:
    """Slots that are multiplied at once: a function of the model alone, since bits depend on it."""
    return 16 if D * dtype.itemsize >= 1024 else 64 if D <= 64 else 32
