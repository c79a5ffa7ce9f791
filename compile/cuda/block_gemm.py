"""Matrix products of GGUF blocks for few rows in Triton.

No weight is rounded. As in `gemm`, a row's bits depend on that row and the weights alone. Codes are exact operands of
the matrix units; the products of a group are summed in float32 and then multiplied by the group's scale, as the file
has it. A group's minimum is multiplied by the sum of its inputs, which is a product with ones.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile.cuda.block_codes import codes, factors, packed_codes, planes
from compile.cuda.block_form import BlockForm
from compile.cuda.dependent_launch import wait_for_predecessor
from compile.cuda.gemm import LINE, finish, outputs_of, visits_of
from compile.cuda.gemm_config import ROWS, Tile
from compile.cuda.pdl import launch_options

DECODED_ROWS = 16
"""Rows of weights that a program decodes."""


@triton.jit(do_not_specialize=["M"])
def block_row_gemm(
    x_ptr,  # [M, K]
    words_ptr,  # int32 [records, UNITS, words], see `block_form`
    y_ptr,  # [M, STRIDE], of which N columns are written
    bias_ptr,  # [W] or None; W = N, or 2 N with GATED
    residual_ptr,  # [M, STRIDE] or None: added
    parts_ptr,  # float32 [tiles, SPLIT, BN + 1, ROWS], if K is split
    counters_ptr,  # int32 [tiles], zero before and after, if K is split
    tiles_ptr,  # of experts: see `gemm.row_gemm`; else None
    order_ptr,
    M,
    N,
    STRIDE,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    HEADERS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    TABLE: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    CHOSEN: tl.constexpr,
    EXPERT_WORDS: tl.constexpr,
    EXPERT_OUTPUTS: tl.constexpr,
):
    """Multiply. Grid (tiles of rows, tiles of outputs, SPLIT): neighbours share weights.

    CHOSEN: see `gemm.row_gemm`. Weights of experts begin EXPERT_WORDS after each other, biases EXPERT_OUTPUTS.
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
        words_ptr += expert.to(tl.int64) * EXPERT_WORDS
        if bias_ptr is not None:
            bias_ptr += expert * EXPERT_OUTPUTS
    outs, w_rows = outputs_of(tile_n, N, GATED, BN)
    is_valid = outs < N
    WORDS: tl.constexpr = 16 * (HEADERS + UNIT * (LOW + HIGH) // 32)
    UNITS: tl.constexpr = (K + UNIT - 1) // UNIT
    HALVES: tl.constexpr = UNIT // 128
    STEPS: tl.constexpr = (UNITS * HALVES + SPLIT - 1) // SPLIT
    record = (w_rows // 16).to(tl.int64) * (UNITS * WORDS)
    if PDL and CHOSEN == 0:
        first = part * STEPS // HALVES * WORDS
        _prefetch(words_ptr + record, w_rows % 16, is_valid, first, UNITS * WORDS, STEPS // HALVES + 1, WORDS, STAGES)
        wait_for_predecessor(PDL)

    headers_ptr = words_ptr + record + w_rows % 16
    columns = tl.arange(0, COLUMNS)
    planes_ptr = words_ptr.to(tl.pointer_type(tl.int16))
    codes_ptr = planes_ptr + (2 * record + w_rows % 16 * COLUMNS)[:, None] + columns[None, :]
    x_at = x_ptr + rows[None, :] * K + columns[:, None]
    MASKED: tl.constexpr = UNITS * UNIT != K or UNITS * HALVES % SPLIT != 0
    acc = tl.zeros((BN, ROWS), dtype=tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        unit, half = (part * STEPS + step) // HALVES, (part * STEPS + step) % HALVES
        mask = is_valid
        if UNITS * HALVES % SPLIT != 0:
            mask = mask & (unit < UNITS)
        words, at_planes = headers_ptr + unit * WORDS, codes_ptr + unit * (2 * WORDS)
        for t in tl.static_range(UNIT // COLUMNS // HALVES):
            if t * COLUMNS % GROUP == 0:
                scale, offset = factors(
                    words, mask, t * COLUMNS // GROUP, half, HALVES, HEADERS, SCALES, MINIMUM, BIAS, GROUP
                )
            low, high = planes(at_planes, mask[:, None], t, half, HALVES, HEADERS, LOW, HIGH, UNIT, COLUMNS)
            q = _operand(low, high, t, half, x_ptr.dtype.element_ty, LOW, HIGH, ZERO, TABLE, PACKED_MATH)
            first = tl.multiple_of((part * STEPS + step) * (UNIT // HALVES) + t * COLUMNS, COLUMNS)
            inside = live[None, :]
            if MASKED:
                inside = inside & (first + columns < K)[:, None]
            x = tl.load(x_at + first, mask=inside, other=0.0)
            if t * COLUMNS % GROUP == 0:
                products = tl.zeros((BN, ROWS), dtype=tl.float32)
                sums = tl.zeros((BN, ROWS), dtype=tl.float32)
            products = tl.dot(q, x, products, input_precision="ieee")
            if MINIMUM:
                ones = tl.full((BN, COLUMNS), 1.0, tl.float32).to(x.dtype)
                sums = tl.dot(ones, x, sums, input_precision="ieee")
            if (t + 1) * COLUMNS % GROUP == 0:
                acc += products * scale[:, None]
                if MINIMUM:
                    acc += sums * offset[:, None]
    finish(
        acc, tl.zeros((ROWS,), dtype=tl.float32), y_ptr, bias_ptr, None, residual_ptr, None, parts_ptr, counters_ptr,
        to_rows, live, w_rows, outs, is_valid, STRIDE, 0.0, K, GATED, ROWS, BN, SPLIT,
    )  # fmt: skip


@triton.jit
def _operand(low, high, t: tl.constexpr, half, dtype: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
             ZERO: tl.constexpr, TABLE: tl.constexpr, PACKED_MATH: tl.constexpr):  # fmt: skip
    """Codes of a tile around 0 in a dtype."""
    if PACKED_MATH:
        return packed_codes(low, high, t, half, dtype, LOW, HIGH, ZERO, TABLE)
    else:
        return codes(low, high, t, half, LOW, HIGH, ZERO, TABLE).to(dtype)


@triton.jit
def decode_rows_kernel(
    ids_ptr,  # int64 [R] or None: all
    words_ptr,
    y_ptr,  # [R, K]
    R,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    HEADERS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    TABLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write rows of weights, rounded once.

    Grid (tiles of rows, units, their halves).
    """
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask, unit, half = at < R, tl.program_id(1), tl.program_id(2)
    HALVES: tl.constexpr = UNIT // 128
    w_rows = at.to(tl.int64)
    if ids_ptr is not None:
        w_rows = tl.load(ids_ptr + at, mask=mask, other=0)
    WORDS: tl.constexpr = 16 * (HEADERS + UNIT * (LOW + HIGH) // 32)
    UNITS: tl.constexpr = (K + UNIT - 1) // UNIT
    record, lane, columns = (w_rows // 16 * UNITS + unit) * WORDS, w_rows % 16, tl.arange(0, COLUMNS)
    words = words_ptr + record + lane
    at_planes = words_ptr.to(tl.pointer_type(tl.int16)) + (2 * record + lane * COLUMNS)[:, None] + columns[None, :]
    for t in tl.static_range(UNIT // COLUMNS // HALVES):
        scale, offset = factors(words, mask, t * COLUMNS // GROUP, half, HALVES, HEADERS, SCALES, MINIMUM, BIAS, GROUP)
        low, high = planes(at_planes, mask[:, None], t, half, HALVES, HEADERS, LOW, HIGH, UNIT, COLUMNS)
        value = codes(low, high, t, half, LOW, HIGH, ZERO, TABLE) * scale[:, None]
        if MINIMUM:
            value += offset[:, None]
        k = unit * UNIT + half * (UNIT // HALVES) + t * COLUMNS + columns
        inside = mask[:, None] & (k < K)[None, :]
        tl.store(y_ptr + at.to(tl.int64)[:, None] * K + k[None, :], value.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _prefetch(record, lane, is_valid, first, END: tl.constexpr, STEPS: tl.constexpr, WORDS: tl.constexpr, STAGES):
    """Prefetch the first units of records, without waiting.

    Each row of a record takes every 16th line.
    """
    LINE_WORDS: tl.constexpr = LINE // 4
    AHEAD: tl.constexpr = WORDS * (STEPS if STEPS < STAGES else STAGES)
    LINES: tl.constexpr = triton.next_power_of_2((AHEAD + 16 * LINE_WORDS - 1) // (16 * LINE_WORDS))
    at = first + (lane[:, None] + 16 * tl.arange(0, LINES)[None, :]) * LINE_WORDS
    inside = is_valid[:, None] & (at < END)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [record[:, None] + tl.where(inside, at, 0), inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


class Visits(NamedTuple):
    """Rows of experts, whose weights lie one after the other."""

    tiles_T3: Tensor
    order_V: Tensor
    """See `gemm.row_gemm`."""
    chosen: int
    words: int
    """Words of 32 bits from the weights of one expert to those of the next."""
    outputs: int
    """Biases of an expert."""


def multiply_blocks(
    x_MK: Tensor,
    words: Tensor,
    form: BlockForm,
    y_MN: Tensor,
    first: int,
    num: int,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: str = "",
    counters: Tensor | None = None,
    visits: Visits | None = None,
) -> None:
    """Write columns of [M, N] from `first` on by `block_row_gemm`.

    There are `num` of them. Tensors are contiguous on one device. Bias and residual are of all columns; gated columns
    are half of the weights. With `visits`, `words` begin with those of the first expert, and lines of y are visits.
    """
    M, K = x_MK.shape
    tiles = triton.cdiv(M, ROWS) if visits is None else len(visits.tiles_T3)
    grid = (tiles, triton.cdiv(num, tile.outputs // 2 if gated else tile.outputs), tile.split)
    parts = None
    if tile.split > 1:
        assert counters is not None and grid[0] * grid[1] <= len(counters), (grid, counters)
        parts = x_MK.new_empty(grid[0] * grid[1] * tile.split * (tile.outputs + 1) * ROWS, dtype=torch.float32)
    block_row_gemm[grid](
        x_MK, words, _from(y_MN, first), _from(bias, first), _from(residual, first), parts,
        counters if tile.split > 1 else None, *((None, None) if visits is None else visits[:2]), M, num,
        y_MN.shape[1], K=K, **_layout(form), GATED=gated, ROWS=ROWS, BN=tile.outputs, SPLIT=tile.split,
        STAGES=tile.stages, PACKED_MATH=x_MK.is_cuda and x_MK.dtype != torch.float32,
        CHOSEN=0 if visits is None else visits.chosen, EXPERT_WORDS=0 if visits is None else visits.words,
        EXPERT_OUTPUTS=0 if visits is None else visits.outputs, num_warps=tile.warps, num_stages=tile.stages,
        **launch_options(x_MK.device),
    )  # fmt: skip


def _from(tensor: Tensor | None, first: int) -> Tensor | None:
    """Return a tensor's columns from `first` on."""
    return tensor if tensor is None or first == 0 else tensor[..., first:]


def decode_rows(rows: Tensor | None, words: Tensor, form: BlockForm, y_RK: Tensor) -> None:
    """Write some rows of weights, or all."""
    R, K = y_RK.shape
    layout = _layout(form)
    grid = (triton.cdiv(R, DECODED_ROWS), triton.cdiv(K, form.unit), form.unit // 128)
    decode_rows_kernel[grid](rows, words, y_RK, R, K=K, **layout, ROWS=DECODED_ROWS, num_warps=1)


def _layout(form: BlockForm) -> dict[str, object]:
    """Return the constants of the kernels."""
    return {
        "UNIT": form.unit, "HEADERS": form.headers, "LOW": form.low, "HIGH": form.high, "ZERO": form.zero,
        "GROUP": form.group, "COLUMNS": form.columns, "SCALES": form.scales, "MINIMUM": form.minimum,
        "BIAS": form.bias, "TABLE": form.table,
    }  # fmt: skip
