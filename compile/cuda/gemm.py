"""Matrix products for few rows in Triton: batch invariant.

y = W x with the weights as first operand and the rows as the 16 columns of the second. A row's bits depend on that row,
the weights and (N, K) alone: tile, order of summation and split of K are those of the weights (`gemm_config.Tile`);
further rows are further tiles of 16, and missing rows of a tile are masked. If K is split, the program that arrives
last adds the parts, first to last. No sum is made by atomics.

A kernel that begins before its predecessor has ended (`pdl`) prefetches weights, which no kernel writes, into the
second level of cache, and then waits.

Legend: M rows, N outputs, K inputs, G groups of a row of 4-bit weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile.cuda.dependent_launch import wait_for_predecessor
from compile.cuda.gemm_config import ROWS, Tile
from compile.cuda.pdl import launch_options

LINE = tl.constexpr(128)
"""Bytes per prefetch."""


@triton.jit(do_not_specialize=["M"])
def row_gemm(
    x_ptr,  # [M, K]
    w_ptr,  # [W, K] of x's dtype or int8; 4 bits: int16 [W, columns] as `lowbit.pack4` makes them
    y_ptr,  # [M, N]: W = N, or 2 N with GATED
    bias_ptr,  # [W] or None
    norm_ptr,  # [K] or None: x is divided by its root mean square and multiplied by this
    residual_ptr,  # [M, N] or None: added
    scale_ptr,  # 8 bits: float32 [W]; 4 bits: int32 [G, W], scale and offset as two bfloat16 or float16
    parts_ptr,  # float32 [tiles, SPLIT, BN + 1, ROWS], if K is split
    counters_ptr,  # int32 [tiles], zero before and after, if K is split
    tiles_ptr,  # of experts: int32 [tiles of rows, 3], expert (-1: nothing to do), first visit, visits; else None
    order_ptr,  # of experts: int32 [visits], those of an expert after each other
    M,
    N,
    eps,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Multiply. Grid (tiles of rows, tiles of outputs, SPLIT): neighbours share weights.

    CHOSEN, experts of a row: 0 if there is one weight for all; else `w_ptr` and `bias_ptr` hold those of all experts.
    Visit v is that of row v // CHOSEN. Inputs are those of rows, and outputs those of visits in order; if CHOSEN is -1,
    inputs are those of visits in order, and outputs those of visits by number.
    """
    tile_n, part = tl.program_id(1), tl.program_id(2)
    if CHOSEN == 0:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        live = rows < M
        to_rows = rows
    else:
        wait_for_predecessor(PDL)
        tile_ptr = tiles_ptr + 3 * tl.program_id(0)
        expert = tl.load(tile_ptr)
        if expert < 0:
            return
        rows, to_rows, live = visits_of(tile_ptr, order_ptr, CHOSEN, ROWS)
    outs, w_rows = outputs_of(tile_n, N, GATED, BN)
    W = 2 * N if GATED != "" else N
    is_valid = outs < N
    if CHOSEN != 0:
        w_ptr += expert.to(tl.int64) * W * COLUMNS
        if bias_ptr is not None:
            bias_ptr += expert * W
    w_base = w_ptr + w_rows[:, None].to(tl.int64) * COLUMNS
    STEPS: tl.constexpr = (COLUMNS + BK * SPLIT - 1) // (BK * SPLIT)
    if PDL and CHOSEN == 0:
        _prefetch(w_base, is_valid, part * STEPS * BK, COLUMNS, STEPS * BK, BN, BK, STAGES)
        wait_for_predecessor(PDL)

    acc = tl.zeros((BN, ROWS), dtype=tl.float32)
    squares = tl.zeros((BK, ROWS), dtype=tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        first = (part * STEPS + step) * BK
        columns = first + tl.arange(0, BK)
        mask = is_valid[:, None]
        if COLUMNS % (BK * SPLIT) != 0:
            mask = mask & (columns < COLUMNS)[None, :]
        w = tl.load(w_base + columns[None, :], mask=mask, other=0)
        if GROUP == 0:
            x, squares = input_rows(x_ptr, norm_ptr, rows, live, columns, squares, K, COLUMNS % (BK * SPLIT) != 0)
            w = w.to(x.dtype) if PACKED_MATH else w.to(tl.float32).to(x.dtype)
            acc = tl.dot(w, x, acc, input_precision="ieee")
        else:
            # Column c of block b holds inputs c, c + GROUP, c + 2 GROUP, c + 3 GROUP of the block's 4 GROUP inputs.
            group = first // GROUP * 4
            k = tl.multiple_of(group * GROUP + first % GROUP, BK) + tl.arange(0, BK)
            q0, q1, q2, q3 = _codes4(w, x_ptr.dtype.element_ty, PACKED_MATH)
            MASKED: tl.constexpr = K != 4 * COLUMNS or COLUMNS % (BK * SPLIT) != 0
            for i in tl.static_range(4):
                q = q0 if i == 0 else q1 if i == 1 else q2 if i == 2 else q3
                inside = is_valid & ((group + i) * GROUP < K)
                factors = tl.load(scale_ptr + (group + i) * W + w_rows, mask=inside, other=0)
                x, squares = input_rows(x_ptr, norm_ptr, rows, live, k + i * GROUP, squares, K, MASKED)
                acc = tl.dot(_dequantized(q, factors, PACKED_MATH), x, acc, input_precision="ieee")

    finish(
        acc, tl.sum(squares, 0), y_ptr, bias_ptr, norm_ptr, residual_ptr, scale_ptr if GROUP == 0 else None, parts_ptr,
        counters_ptr, to_rows, live, w_rows, outs, is_valid, N, eps, K, GATED, ROWS, BN, SPLIT,
    )  # fmt: skip


@triton.jit
def visits_of(tile_ptr, order_ptr, CHOSEN: tl.constexpr, ROWS: tl.constexpr):
    """Rows of inputs and of outputs of a tile of visits, and which of them there are."""
    lanes = tl.arange(0, ROWS)
    at, live = tl.load(tile_ptr + 1) + lanes, lanes < tl.load(tile_ptr + 2)
    visits = tl.load(order_ptr + at, mask=live, other=0)
    rows = visits // CHOSEN if CHOSEN > 0 else at
    to_rows = at if CHOSEN > 0 else visits
    return rows, to_rows, live


@triton.jit
def outputs_of(tile_n, N, GATED: tl.constexpr, BN: tl.constexpr):
    """Outputs of a tile, and their rows of weights: with GATED half are gates, half what they let through."""
    lanes = tl.arange(0, BN)
    if GATED != "":
        outs = tile_n * (BN // 2) + lanes % (BN // 2)
        return outs, outs + lanes // (BN // 2) * N
    else:
        outs = tile_n * BN + lanes
        return outs, outs


@triton.jit
def finish(
    acc, total, y_ptr, bias_ptr, norm_ptr, residual_ptr, scale_ptr, parts_ptr, counters_ptr, rows, live, w_rows, outs,
    is_valid, N, eps,
    K: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Join the parts of a split K, and store."""
    if SPLIT == 1:
        _store(
            acc, total, y_ptr, bias_ptr, norm_ptr, residual_ptr, scale_ptr, rows, live, w_rows, outs, is_valid, N, eps,
            K, GATED, ROWS, BN,
        )  # fmt: skip
    else:
        part = tl.program_id(2)
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        at = tl.arange(0, BN)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        at_total = BN * ROWS + tl.arange(0, ROWS)
        SIZE: tl.constexpr = (BN + 1) * ROWS
        tile_ptr = parts_ptr + tile.to(tl.int64) * SPLIT * SIZE
        tl.store(tile_ptr + part * SIZE + at, acc)
        tl.store(tile_ptr + part * SIZE + at_total, total)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            acc = tl.zeros((BN, ROWS), dtype=tl.float32)
            total = tl.zeros((ROWS,), dtype=tl.float32)
            for other in range(SPLIT):
                acc += tl.load(tile_ptr + other * SIZE + at, cache_modifier=".cg")
                total += tl.load(tile_ptr + other * SIZE + at_total, cache_modifier=".cg")
            tl.store(counters_ptr + tile, 0)
            _store(
                acc, total, y_ptr, bias_ptr, norm_ptr, residual_ptr, scale_ptr, rows, live, w_rows, outs, is_valid, N,
                eps, K, GATED, ROWS, BN,
            )  # fmt: skip


@triton.jit
def _prefetch(w_base, is_valid, first, COLUMNS: tl.constexpr, PART: tl.constexpr, BN, BK, STAGES):
    """Prefetch the weights of the first steps, without waiting."""
    SIZE: tl.constexpr = w_base.dtype.element_ty.primitive_bitwidth // 8
    PER_LINE: tl.constexpr = LINE // SIZE
    AHEAD: tl.constexpr = PART if PART < BK * STAGES else BK * STAGES
    LINES: tl.constexpr = triton.next_power_of_2((AHEAD + PER_LINE - 1) // PER_LINE)
    columns = first + tl.arange(0, LINES) * PER_LINE
    inside = is_valid[:, None] & (columns < COLUMNS)[None, :]
    addresses = w_base + tl.where(columns < COLUMNS, columns, 0)[None, :]
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def input_rows(x_ptr, norm_ptr, rows, live, k, squares, K: tl.constexpr, MASKED: tl.constexpr):
    """Tile [k, rows] of inputs as an operand, and sums of squares."""
    mask = live[None, :]
    if MASKED:
        mask = mask & (k < K)[:, None]
    x = tl.load(x_ptr + rows[None, :] * K + k[:, None], mask=mask, other=0.0)
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        squares += wide * wide
        weight = tl.load(norm_ptr + k, mask=k < K, other=0.0) if MASKED else tl.load(norm_ptr + k)
        x = (wide * weight.to(tl.float32)[:, None]).to(x.dtype)
    return x, squares


@triton.jit
def _codes4(w, dtype: tl.constexpr, PACKED_MATH: tl.constexpr):
    """Four codes of each int16, around 0, lowest bits first."""
    if PACKED_MATH:
        # Or-ed into the mantissa of 128 (bfloat16) or 1024 (float16), two at a time; then that and 8 are taken off.
        MAGIC: tl.constexpr = "0x43004300" if dtype == tl.bfloat16 else "0x64006400"
        ONE: tl.constexpr = "0x3f803f80" if dtype == tl.bfloat16 else "0x3c003c00"
        LESS: tl.constexpr = "0xc308c308" if dtype == tl.bfloat16 else "0xe408e408"
        NAME: tl.constexpr = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d, one, less; mov.b32 one, " + ONE + "; mov.b32 less, " + LESS + ";"
            "shr.b32 b, $4, 4; shr.b32 c, $4, 8; shr.b32 d, $4, 12;"
            "lop3.b32 a, $4, 0x000f000f, " + MAGIC + ", 0xea; lop3.b32 b, b, 0x000f000f, " + MAGIC + ", 0xea;"
            "lop3.b32 c, c, 0x000f000f, " + MAGIC + ", 0xea; lop3.b32 d, d, 0x000f000f, " + MAGIC + ", 0xea;"
            "fma.rn." + NAME + " $0, a, one, less; fma.rn." + NAME + " $1, b, one, less;"
            "fma.rn." + NAME + " $2, c, one, less; fma.rn." + NAME + " $3, d, one, less; }",
            "=r,=r,=r,=r,r",
            [w],
            dtype=(dtype.value, dtype.value, dtype.value, dtype.value),
            is_pure=True,
            pack=2,
        )
    return _value(w, dtype), _value(w >> 4, dtype), _value(w >> 8, dtype), _value(w >> 12, dtype)


@triton.jit
def _value(codes, dtype: tl.constexpr):
    return (
        ((codes & 15) - 8).to(tl.float32).to(dtype)
    )  # Triton's interpreter has no conversion from integers to bfloat16


@triton.jit
def _dequantized(q, factors, PACKED_MATH: tl.constexpr):
    """codes * scale + offset, rounded once.

    A factor holds the scale in its lower half.
    """
    half: tl.constexpr = q.dtype
    if half == tl.float32:
        scale, offset = (factors << 16).to(tl.float32, bitcast=True), (factors & -65536).to(tl.float32, bitcast=True)
    else:
        scale, offset = factors.to(tl.int16).to(half, bitcast=True), (factors >> 16).to(tl.int16).to(half, bitcast=True)
    if PACKED_MATH:
        scales, offsets = tl.broadcast_to(scale[:, None], q.shape), tl.broadcast_to(offset[:, None], q.shape)
        NAME: tl.constexpr = "bf16x2" if half == tl.bfloat16 else "f16x2"
        return tl.inline_asm_elementwise(
            "fma.rn." + NAME + " $0, $1, $2, $3;",
            "=r,r,r,r",
            [q, scales, offsets],
            dtype=q.dtype,
            is_pure=True,
            pack=2,
        )
    else:
        return (q.to(tl.float32) * scale.to(tl.float32)[:, None] + offset.to(tl.float32)[:, None]).to(half)


@triton.jit
def _store(
    acc, total, y_ptr, bias_ptr, norm_ptr, residual_ptr, scale_ptr, rows, live, w_rows, outs, is_valid, N, eps,
    K: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Norm, bias, gate and residual in float32, and the store."""
    if norm_ptr is not None:
        acc *= tl.rsqrt(total / K + eps)[None, :]
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + w_rows, mask=is_valid, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + w_rows, mask=is_valid, other=0.0).to(tl.float32)[:, None]
    if GATED != "":
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BN // 2, ROWS)), (1, 2, 0)))
        if GATED == "swiglu_oai":
            gate, up = tl.where(gate > 7.0, 7.0, gate), tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
            acc = gate * tl.sigmoid(1.702 * gate) * (up + 1)
        else:
            acc = _activated(gate, GATED) * up
        outs = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)
        is_valid = outs < N
    at = rows[None, :].to(tl.int64) * N + outs[:, None]
    mask = is_valid[:, None] & live[None, :]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _activated(x, NAME: tl.constexpr):
    if NAME == "silu":
        return x * tl.sigmoid(x)
    elif NAME == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(NAME == "gelu_pytorch_tanh")
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 0.5 (1 + tanh(u)) = sigmoid(2 u)


def multiply(
    x_MK: Tensor,
    weight: Tensor,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: str = "",
    scale: Tensor | None = None,
    group: int = 0,
    counters: Tensor | None = None,
) -> Tensor:
    """Return [M, N] by `row_gemm`; tensors are contiguous on one device."""
    M, K = x_MK.shape
    W, columns = weight.shape
    N = W // 2 if gated else W
    y_MN = x_MK.new_empty(M, N)
    per_tile = tile.outputs // 2 if gated else tile.outputs
    grid = (triton.cdiv(M, ROWS), triton.cdiv(N, per_tile), tile.split)
    parts = None
    if tile.split > 1:
        assert counters is not None and grid[0] * grid[1] <= len(counters), (grid, counters)
        parts = x_MK.new_empty(grid[0] * grid[1] * tile.split * (tile.outputs + 1) * ROWS, dtype=torch.float32)
    row_gemm[grid](
        x_MK, weight, y_MN, bias, norm, residual, scale, parts, counters if tile.split > 1 else None, None, None, M, N,
        eps, K=K, COLUMNS=columns, GROUP=group, GATED=gated, ROWS=ROWS, BN=tile.outputs, BK=tile.inputs,
        SPLIT=tile.split, STAGES=tile.stages, PACKED_MATH=x_MK.is_cuda and x_MK.dtype != torch.float32, CHOSEN=0,
        num_warps=tile.warps, num_stages=tile.stages, **launch_options(x_MK.device),
    )  # fmt: skip
    return y_MN
