"""The gated delta rule of a layer on CUDA, for steps, prompts and trees alike: three launches after its first linear.

`mix_tokens` makes queries, keys, values, rates and decays of all tokens that a row's matrices have to go through: those
that they lack, from the ring, then the step's own. `advance_matrices` takes the matrices through them. `gate_outputs`
normalises and gates the results, and only then writes what both have read: inputs of the ring, and what matrices hold.
So no program reads what another one of its launch writes. See `sharesd.kvcache.recurrent`.

A program of `advance_matrices` is one warp with 8 values of a matrix, over all keys, in registers. It reads them once,
and writes them once, where the text is certain. Values need nothing of each other, so a row has as many programs as a
processor takes. Most keys of a value lie in the registers of few lanes: a sum has four shuffles.

A tree's nodes start from the state of their parent. Registers have the state at the length, and each path to a leaf
starts there again, so inner nodes are repeated. To keep their states, each would be written and read again: as much
as a matrix for each node, which takes about as long as the tokens of a path of five, and more memory.

A row's bits depend on its text alone: on no width, batch, place in a tree, nor on where its matrices were stored. All
tokens go through one loop of one kernel, sums have an order of their own, number by number, whatever the layout, and
no product is contracted with a sum unless written so.

Legend: B rows, T new tokens, P slots of a path, R slots of the ring, L inputs of the convolution, C its channels, I
inputs that are kept of a token (C, then a rate and a step of each value head), K key heads, N value heads, k and v
their sizes, V values of a head in memory. Places are slots counted from a row's length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile.cuda.dependent_launch import wait_for_predecessor
from compile.cuda.pdl import launch_options
from compile.delta_sizes import VALUES, DeltaSizes

TOKENS = 8
"""Tokens that a program of the first launch mixes at once."""
PROGRAMS = 32
"""Maximum programs of a head there."""
SLICE = 8
"""Values of a program of the second."""
HEADS = 8
"""Heads of a program of the third."""
NOWHERE = tl.constexpr(1 << 30)
"""A place that no token has."""
_INTS = ["T", "P", "X", "R", "x_b", "x_t", "ring_b"]
_UNALIGNED = ["length_ptr", "held_ptr", "certain_ptr", "end_ptr", "depth_ptr", "path_ptr"]


@triton.jit
def halving_sum(x, NUM: tl.constexpr, SIZE: tl.constexpr):
    """Sums [NUM] over the second dimension, halves added to each other: one order for every layout."""
    for level in tl.static_range(SIZE.bit_length() - 1):
        x = tl.sum(tl.reshape(x, (NUM, 2, SIZE >> (level + 1))), 1)
    return tl.reshape(x, (NUM,))


@triton.jit
def _row_plan(b, T, P, R, length_ptr, held_ptr, certain_ptr, end_ptr, L: tl.constexpr):
    """Length, tokens that are replayed, tokens of a chain that are no padding, and tokens held after the step or -1."""
    length, held = tl.load(length_ptr + b), tl.load(held_ptr + b)
    known = (held <= length) & (length - held <= R - L + 1)
    end = tl.minimum(length + T, tl.load(end_ptr + b))
    certain = tl.load(certain_ptr + b)
    # What the ring cannot hold until a chain's next step is no draft.
    certain = tl.where(P > 0, tl.minimum(certain, length), tl.minimum(tl.maximum(certain, end - (R - L + 1)), end))
    missed = tl.where(known & (length >= 0), length - held, 0).to(tl.int32)
    stored = tl.where(known & (length >= 0) & (certain > held), certain, -1).to(tl.int32)
    return length.to(tl.int32), missed, (end - length).to(tl.int32), stored


@triton.jit
def _row_of_step(place, place_n, T, P, NODES: tl.constexpr):
    """Rows of the step that have these places; -1: none."""
    row = tl.where((place >= 0) & (place < T), place, -1)
    if P > 0:
        same = place[:, None] == place_n[None, :]
        row = tl.max(tl.where(same, tl.arange(0, NODES)[None, :], -1), 1)
    return row


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def mix_tokens(
    x_ptr,  # [B, T, C + N * v + 2 * N]
    ring_ptr,  # [B, R, I]
    weight_ptr,  # [C, L]
    rate_ptr,  # [N]: A_log
    bias_ptr,  # [N]
    length_ptr,
    held_ptr,
    certain_ptr,
    end_ptr,
    depth_ptr,
    path_ptr,
    mixed_ptr,  # [B, X, I] float32
    T,
    P,
    X,
    R,
    x_b,
    x_t,
    ring_b,
    K: tl.constexpr,
    N: tl.constexpr,
    k: tl.constexpr,
    v: tl.constexpr,
    L: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convolve and normalise queries, keys or values of one head. Grid (2 * K + N, tiles of tokens, B).

    A token's row is R more than its place. Of a tree's step, nodes of earlier steps above its own are mixed, too.
    """
    wait_for_predecessor(PDL)
    group, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    C: tl.constexpr = 2 * K * k + N * v
    length, missed, num, _ = _row_plan(b, T, P, R, length_ptr, held_ptr, certain_ptr, end_ptr, L)
    if length >= 0:
        x_ptr += b * x_b
        ring_ptr += b * ring_b
        mixed_ptr += b * X * (C + 2 * N)
        depth_ptr += b * T
        path_ptr += b * T * P
        n, i = tl.arange(0, NODES), tl.arange(0, SIZE)
        place_n = tl.full((NODES,), NOWHERE, tl.int32)
        if P > 0:
            depth_n = tl.load(depth_ptr + n, mask=n < T, other=0)
            place_n = tl.load(path_ptr + n * P + depth_n, mask=n < T, other=NOWHERE).to(tl.int32)
        head = group - 2 * K
        begin = tl.where(head < 0, group * k, 2 * K * k + head * v)
        in_head = i < tl.where(head < 0, k, v)
        replays, tiles = tl.cdiv(missed, TOKENS), tl.cdiv(T, TOKENS)
        for tile in range(tl.program_id(1), replays + tiles * tl.maximum(P, 1), tl.num_programs(1)):
            own = tile - replays
            t = tl.where(own < 0, tile, own % tiles) * TOKENS + tl.arange(0, TOKENS)
            level = tl.where(own < 0, 0, own // tiles)
            is_path = (own >= 0) & (P > 0)
            depth = tl.load(depth_ptr + t, mask=is_path & (t < T), other=-1).to(tl.int32)
            on_path = is_path & (level <= depth)
            place = tl.where(own < 0, t - missed, t)
            place = tl.where(is_path, tl.load(path_ptr + t * P + level, mask=on_path, other=-1).to(tl.int32), place)
            is_valid = tl.where(own < 0, place < 0, t < num)
            is_new = (level == depth) | (_row_of_step(place, place_n, T, P, NODES) < 0)
            is_valid = tl.where(is_path, on_path & is_new, is_valid)
            if tl.max(is_valid.to(tl.int32), 0) > 0:
                sums = tl.zeros((TOKENS, SIZE), tl.float32)
                for back in tl.static_range(L - 1, -1, -1):
                    tap = tl.where(is_path, level, place) - back
                    above = tl.load(path_ptr + t * P + tap, mask=on_path & (tap >= 0), other=0).to(tl.int32)
                    tap = tl.where(on_path & (tap >= 0), above, tap)
                    row = _row_of_step(tap, place_n, T, P, NODES)
                    taps = _inputs(x_ptr, ring_ptr, row, length + tap, is_valid, begin + i, in_head, R, x_t, C + 2 * N)
                    weight = tl.load(weight_ptr + (begin + i) * L + L - 1 - back, mask=in_head, other=0.0)
                    sums += taps * weight.to(tl.float32)[None, :]
                mixed = sums / (1 + tl.exp(-sums))
                if head < 0:
                    squares = halving_sum(mixed * mixed, TOKENS, SIZE)
                    factor = tl.where(group < K, 1 / tl.sqrt(k * 1.0), 1.0)
                    mixed = mixed * (tl.rsqrt(squares + 1e-6) * factor)[:, None]
                out_ptr = mixed_ptr + (R + place) * (C + 2 * N)
                tl.store(out_ptr[:, None] + (begin + i)[None, :], mixed, mask=is_valid[:, None] & in_head[None, :])
                if head >= 0:
                    row, one = _row_of_step(place, place_n, T, P, NODES), tl.arange(0, 1)
                    slot, always = length + place, one == 0
                    after: tl.constexpr = N * v  # gates lie between in a step's rows
                    gate_ptr = x_ptr + after
                    rate = _inputs(gate_ptr, ring_ptr, row, slot, is_valid, C + head + one, always, R, x_t, C + 2 * N)
                    step = _inputs(
                        gate_ptr, ring_ptr, row, slot, is_valid, C + N + head + one, always, R, x_t, C + 2 * N
                    )
                    step += tl.load(bias_ptr + head).to(tl.float32)
                    decay = tl.exp(-tl.exp(tl.load(rate_ptr + head).to(tl.float32)) * _softplus(step))
                    gate_out = out_ptr[:, None] + C + head + one[None, :]
                    tl.store(gate_out, 1 / (1 + tl.exp(-rate)), mask=is_valid[:, None])
                    tl.store(gate_out + N, decay, mask=is_valid[:, None])


@triton.jit
def _inputs(x_ptr, ring_ptr, row, slot, is_valid, channel, in_head, R, x_t, INPUTS: tl.constexpr):
    """Inputs [tokens, channels] of rows of this step, else of slots in the ring; 0 before the text."""
    of_step, of_text = is_valid & (row >= 0), is_valid & (row < 0) & (slot >= 0)
    at = tl.maximum(row, 0) * x_t
    new = tl.load(x_ptr + at[:, None] + channel[None, :], mask=of_step[:, None] & in_head[None, :], other=0.0)
    at = tl.maximum(slot, 0) % R * INPUTS
    old = tl.load(ring_ptr + at[:, None] + channel[None, :], mask=of_text[:, None] & in_head[None, :], other=0.0)
    return tl.where(of_step[:, None], new, old).to(tl.float32)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); log(1 + e) as 2 artanh(e / (2 + e)), to the last digits also of a tiny e."""
    e = tl.exp(-tl.abs(x))
    z = e / (2 + e)
    s = z * z
    series = 1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13 + s * (1 / 15))))))
    return tl.maximum(x, 0.0) + 2 * z * (1 + s * series)


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def advance_matrices(
    matrix_ptr,  # [B, N, V / 16, k, 16]
    mixed_ptr,
    length_ptr,
    held_ptr,
    certain_ptr,
    end_ptr,
    depth_ptr,
    path_ptr,
    out_ptr,  # [B, X - R, N, v]: of a place
    T,
    P,
    X,
    R,
    K: tl.constexpr,
    N: tl.constexpr,
    k: tl.constexpr,
    v: tl.constexpr,
    L: tl.constexpr,
    TILED: tl.constexpr,
    LINE: tl.constexpr,
    KEYS: tl.constexpr,
    SLICE: tl.constexpr,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Take a slice of a head's matrix through all tokens of a row. Grid (N * slices, B).

    A chain is a tree with one leaf. Places below 0 are replayed. The next token is loaded before its turn.
    """
    wait_for_predecessor(PDL)
    V: tl.constexpr = (v + LINE - 1) // LINE * LINE
    slices: tl.constexpr = (v + SLICE - 1) // SLICE
    INPUTS: tl.constexpr = 2 * K * k + N * v + 2 * N
    head, first, b = tl.program_id(0) // slices, tl.program_id(0) % slices * SLICE, tl.program_id(1).to(tl.int64)
    length, missed, num, stored = _row_plan(b, T, P, R, length_ptr, held_ptr, certain_ptr, end_ptr, L)
    if length >= 0:
        key, value = tl.arange(0, KEYS), tl.arange(0, SLICE)
        matrix_ptr += ((b * N + head) * V + first // LINE * LINE) * k + first % LINE
        lines_ptr = matrix_ptr + key[:, None] * LINE + value[None, :]
        in_matrix = (key < k)[:, None] & (value >= 0)[None, :]
        state = tl.load(lines_ptr, mask=in_matrix, other=0.0)
        at_length = state
        key_head = head % K if TILED else head // (N // K)
        mixed_ptr += (b * X + R) * INPUTS
        out_ptr += (b * (X - R) * N + head) * v + first
        depth_ptr += b * T
        path_ptr += b * T * P
        n = tl.arange(0, NODES)
        parent_n = tl.full((NODES,), -1, tl.int64)
        leaf, depth, j = T - 1, tl.maximum(num - 1, 0), -missed
        if P > 0:
            depth_n = tl.load(depth_ptr + n, mask=n < T, other=0)
            parent_n = tl.load(path_ptr + n * P + depth_n - 1, mask=depth_n > 0, other=-1)
            leaf = _next_leaf(0, parent_n, depth_ptr, path_ptr, T, P)
            depth = tl.load(depth_ptr + leaf).to(tl.int32)
        place = _place(leaf, j, path_ptr, P)
        q, w, x = _token(mixed_ptr, place, True, head, key_head, first, K, N, k, v, KEYS, SLICE)
        rate, decay = _rates(mixed_ptr, place, True, head, K, N, k, v)
        while leaf < T:
            next_leaf, next_j, next_depth = leaf, j + 1, depth
            if j == depth:
                next_leaf, next_j = leaf + 1, 0
                if P > 0:
                    next_leaf = _next_leaf(leaf + 1, parent_n, depth_ptr, path_ptr, T, P)
                    next_depth = tl.load(depth_ptr + next_leaf, mask=next_leaf < T, other=0).to(tl.int32)
            has_next = next_leaf < T
            next_place = tl.where(has_next, _place(tl.minimum(next_leaf, T - 1), next_j, path_ptr, P), 0)
            next_q, next_w, next_x = _token(
                mixed_ptr, next_place, has_next, head, key_head, first, K, N, k, v, KEYS, SLICE
            )
            next_rate, next_decay = _rates(mixed_ptr, next_place, has_next, head, K, N, k, v)
            if j == 0:
                state = at_length
            state = state * decay
            known = _sum_over_keys(state * w[:, None], KEYS, SLICE)
            change = (x - known) * rate
            state = state + change[None, :] * w[:, None]
            out = _sum_over_keys(state * q[:, None], KEYS, SLICE)
            if j < 0:
                at_length = state
            else:
                to_ptr = out_ptr + place.to(tl.int64) * (N * v) + value
                tl.store(to_ptr, out.to(out_ptr.dtype.element_ty), mask=first + value < v)
            if length + j + 1 == stored:
                tl.store(lines_ptr, state, mask=in_matrix)
            q, w, x = next_q, next_w, next_x
            rate, decay = next_rate, next_decay
            leaf, j, depth, place = next_leaf, next_j, next_depth, next_place


@triton.jit
def _sum_over_keys(x, KEYS: tl.constexpr, SLICE: tl.constexpr):
    for level in tl.static_range(KEYS.bit_length() - 1):
        x = tl.sum(tl.reshape(x, (2, KEYS >> (level + 1), SLICE)), 0)
    return tl.reshape(x, (SLICE,))


@triton.jit
def _token(
    mixed_ptr, place, is_there, head, key_head, first,
    K: tl.constexpr, N: tl.constexpr, k: tl.constexpr, v: tl.constexpr, KEYS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Query, key and slice of the value of a head's token."""
    C: tl.constexpr = 2 * K * k + N * v
    mixed_ptr += place.to(tl.int64) * (C + 2 * N)
    i, value = tl.arange(0, KEYS), first + tl.arange(0, SLICE)
    query = tl.load(mixed_ptr + key_head * k + i, mask=is_there & (i < k), other=0.0)
    key = tl.load(mixed_ptr + (K + key_head) * k + i, mask=is_there & (i < k), other=0.0)
    values = tl.load(mixed_ptr + 2 * K * k + head * v + value, mask=is_there & (value < v), other=0.0)
    return query, key, values


@triton.jit
def _rates(mixed_ptr, place, is_there, head, K: tl.constexpr, N: tl.constexpr, k: tl.constexpr, v: tl.constexpr):
    """Rate and decay of a head's token."""
    C: tl.constexpr = 2 * K * k + N * v
    mixed_ptr += place.to(tl.int64) * (C + 2 * N) + C + head
    return tl.load(mixed_ptr, mask=is_there, other=0.0), tl.load(mixed_ptr + N, mask=is_there, other=0.0)


@triton.jit
def _place(leaf, j, path_ptr, P):
    """Place of a leaf's path at this depth; below 0 in the text."""
    place = j
    if P > 0:
        place = tl.where(j < 0, j, tl.load(path_ptr + leaf * P + j, mask=j >= 0, other=0).to(tl.int32))
    return place


@triton.jit
def _next_leaf(t, parent_n, depth_ptr, path_ptr, T, P):
    """The first node from t on that is no parent; T: none."""
    t += 0 * T  # a tensor
    while _is_parent(t, parent_n, depth_ptr, path_ptr, T, P):
        t += 1
    return t


@triton.jit
def _is_parent(t, parent_n, depth_ptr, path_ptr, T, P):
    is_node = t < T
    depth = tl.load(depth_ptr + t, mask=is_node, other=0)
    place = tl.load(path_ptr + t * P + depth, mask=is_node, other=-2)
    return tl.max((parent_n == place).to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def gate_outputs(
    out_ptr,
    x_ptr,
    ring_ptr,
    norm_ptr,  # [v]
    length_ptr,
    held_ptr,
    certain_ptr,
    end_ptr,
    depth_ptr,
    path_ptr,
    y_ptr,  # [B, T, N, v]
    T,
    P,
    X,
    R,
    x_b,
    x_t,
    ring_b,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    k: tl.constexpr,
    v: tl.constexpr,
    L: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    SHARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm and gate some heads of a token, and write a part of its inputs to the ring. Grid (T, PARTS, B)."""
    wait_for_predecessor(PDL)
    t, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    C: tl.constexpr = 2 * K * k + N * v
    length, _, num, stored = _row_plan(b, T, P, R, length_ptr, held_ptr, certain_ptr, end_ptr, L)
    place, is_kept, is_valid = t, (t < num) & (t >= num - R), (length >= 0) & (t < num)
    if P > 0:
        depth = tl.load(depth_ptr + b * T + t)
        place, is_kept = tl.load(path_ptr + (b * T + t) * P + depth).to(tl.int32), True
    head, i = part * HEADS + tl.arange(0, HEADS), tl.arange(0, SIZE)
    at = head[:, None] * v + i[None, :]
    is_number = (head < N)[:, None] & (i < v)[None, :]
    x_ptr += b * x_b + t * x_t
    out = tl.load(out_ptr + (b * (X - R) + place) * (N * v) + at, mask=is_number & is_valid, other=0.0)
    wide = out.to(tl.float32)
    root = tl.rsqrt(halving_sum(wide * wide, HEADS, SIZE) / v + eps)
    normed = (wide * root[:, None]).to(out.dtype).to(tl.float32)
    weight = tl.load(norm_ptr + i, mask=i < v, other=0.0).to(tl.float32)
    normed = (normed * weight[None, :]).to(out.dtype).to(tl.float32)
    gate = tl.load(x_ptr + C + at, mask=is_number & is_valid, other=0.0).to(tl.float32)
    y = normed * (gate / (1 + tl.exp(-gate)))
    tl.store(y_ptr + (b * T + t) * (N * v) + at, y.to(y_ptr.dtype.element_ty), mask=is_number)
    if is_valid:
        if is_kept:
            channel = part * SHARE + tl.arange(0, triton.next_power_of_2(SHARE))
            is_own = (channel < (part + 1) * SHARE) & (channel < C + 2 * N)
            inputs = tl.load(x_ptr + channel + tl.where(channel < C, 0, N * v), mask=is_own, other=0.0)
            tl.store(ring_ptr + b * ring_b + (length + place) % R * (C + 2 * N) + channel, inputs, mask=is_own)
        if (t == 0) & (part == 0) & (stored >= 0):
            tl.store(held_ptr + b, stored.to(tl.int64))


def gated_delta(
    x_BTW: Tensor,
    ring_BRI: Tensor,
    matrices: Tensor,
    held_B: Tensor,
    certain_B: Tensor,
    ends_B: Tensor,
    lengths_B: Tensor,
    depth: Tensor | None,
    path: Tensor | None,
    weight_CL: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    norm_v: Tensor,
    eps: float,
    sizes: DeltaSizes,
) -> Tensor:
    """Return gated results [B, T, N * v] of x, the first linear's; write inputs to the ring, and move what is certain.

    x has q, k and v, then gates z, rates b and steps a. From `ends_B` on tokens are padding: they leave no trace, and
    their results are 0. So are those of rows without a text, whose length is below 0. See `compile.delta_rule`.
    """
    (B, T, _), R, L = x_BTW.shape, ring_BRI.shape[1], weight_CL.shape[1]
    K, N, k, v = sizes.key_heads, sizes.value_heads, sizes.key_size, sizes.value_size
    if x_BTW.stride(2) != 1:
        x_BTW = x_BTW.contiguous()
    assert ring_BRI.stride(1) == ring_BRI.shape[2] and matrices.is_contiguous() and weight_CL.is_contiguous()
    P = 0 if path is None else path.shape[2]
    depth_BT, path_BTP = (
        (lengths_B, lengths_B) if depth is None or path is None else (depth.contiguous(), path.contiguous())
    )
    X = R + (R if P else T)
    mixed_BXI = torch.empty(B, X, sizes.inputs, dtype=torch.float32, device=x_BTW.device)
    out_BXNv = torch.empty(B, X - R, N, v, dtype=x_BTW.dtype, device=x_BTW.device)
    y_BTW = torch.empty(B, T, N * v, dtype=x_BTW.dtype, device=x_BTW.device)
    places = (lengths_B, held_B, certain_B, ends_B, depth_BT, path_BTP)
    heads = {"K": K, "N": N, "k": k, "v": v, "L": L}
    nodes = triton.next_power_of_2(max(T, 16)) if P else 16
    how = {"enable_fp_fusion": False, **launch_options(x_BTW.device)}
    strides = x_BTW.stride(0), x_BTW.stride(1), ring_BRI.stride(0)
    size = triton.next_power_of_2(max(k, v))
    tiles = min(PROGRAMS, triton.cdiv(T, TOKENS) * max(P, 1) + 2)  # two for those that are replayed, or more
    mix_tokens[2 * K + N, tiles, B](
        *(x_BTW, ring_BRI, weight_CL, A_log_N, dt_bias_N, *places, mixed_BXI, T, P, X, R, *strides),
        **heads, SIZE=size, TOKENS=TOKENS, NODES=nodes, num_warps=4, **how,
    )  # fmt: skip
    advance_matrices[N * triton.cdiv(v, SLICE), B](
        *(matrices, mixed_BXI, *places, out_BXNv, T, P, X, R),
        **heads, TILED=sizes.tiled, LINE=VALUES, KEYS=triton.next_power_of_2(k), SLICE=SLICE, NODES=nodes,
        num_warps=1, **how,
    )  # fmt: skip
    parts = triton.cdiv(N, HEADS)
    gate_outputs[T, parts, B](
        *(out_BXNv, x_BTW, ring_BRI, norm_v, *places, y_BTW, T, P, X, R, *strides, eps),
        **heads, HEADS=HEADS, SIZE=triton.next_power_of_2(v), PARTS=parts, SHARE=triton.cdiv(sizes.inputs, parts),
        num_warps=4, **how,
    )  # fmt: skip
    return y_BTW
