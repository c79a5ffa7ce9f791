"""Mixtures of experts in Triton: a row reads the weights of its experts alone, and rows with the same one share them.

Five launches after the router: `choose`, `group`, gate and up, down, `join`. The products are `gemm.row_gemm`, or
`block_gemm.block_row_gemm` for weights as a file stores them, over tiles of up to 16 visits of one expert; a visit is a
row and one of its experts. A row's bits depend on the row alone: on a tile no row sees another, and a row's visits are
added in the order of their experts. The host reads nothing.

Legend: M rows, D inputs, E experts, k of a row, V = M k visits, I size between gate, up and down, T tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile.cuda.block_form import FORMS, ExpertBlocks
from compile.cuda.block_gemm import Visits, multiply_blocks
from compile.cuda.dependent_launch import wait_for_predecessor
from compile.cuda.gemm import row_gemm
from compile.cuda.gemm_config import ROWS, Tile, block_tile
from compile.cuda.pdl import launch_options, with_room
from compile.fused_linear import compose

_CHUNK, _BLOCK = 32, 1024


@triton.jit
def choose(
    scores_ptr,  # [M, W], of which the first E are experts'
    bias_ptr,  # float32 [E]: probabilities are sigmoids, and choose with this added; None: a softmax
    experts_ptr,  # int32 [M, k], in ascending order
    factors_ptr,  # float32 [M, k], rounded to the scores' dtype
    scale,
    sum_eps,
    W: tl.constexpr,
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALISED: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose a row's experts: those of the highest probability, of equal ones the lowest."""
    wait_for_predecessor(PDL)
    row, lanes = tl.program_id(0), tl.arange(0, SIZE)
    scores = tl.load(scores_ptr + row * W + lanes, mask=lanes < E, other=-float("inf")).to(tl.float32)
    if bias_ptr is None:
        powers = tl.exp(scores - tl.max(scores, 0))
        probs = powers / tl.sum(powers, 0)
        by = probs
    else:
        probs = tl.sigmoid(scores)
        by = probs + tl.load(bias_ptr + lanes, mask=lanes < E, other=0.0)
    by = tl.where(by == by, by, -3e38)  # NaN chooses experts that exist, too
    by = tl.where(lanes < E, by, -float("inf"))
    chosen = lanes < 0
    for _ in tl.static_range(CHOSEN):
        best = tl.min(tl.where(by == tl.max(by, 0), lanes, SIZE), 0)
        chosen = chosen | (lanes == best)
        by = tl.where(lanes == best, -float("inf"), by)
    factors = probs
    if NORMALISED:
        factors = probs / (tl.sum(tl.where(chosen, probs, 0.0), 0) + sum_eps)
    factors = (factors * scale).to(scores_ptr.dtype.element_ty).to(tl.float32)
    place = row * CHOSEN + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(experts_ptr + place, lanes, mask=chosen)
    tl.store(factors_ptr + place, factors, mask=chosen)


@triton.jit(do_not_specialize=["V", "T", "MOST"])
def group(
    experts_ptr,  # int32 [V]
    tiles_ptr,  # int32 [T, 3]: see `row_gemm`
    order_ptr,  # int32 [V]
    V,
    T,
    MOST,  # tiles that an expert can have
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Order visits by expert, those of an expert by number, and divide them into tiles. One program."""
    wait_for_predecessor(PDL)
    expert, lanes = tl.arange(0, SIZE), tl.arange(0, CHUNK)
    counts = tl.zeros((SIZE,), dtype=tl.int32)
    for begin in range(0, V, CHUNK):
        chosen = tl.load(experts_ptr + begin + lanes, mask=begin + lanes < V, other=-1)
        counts += tl.sum((expert[:, None] == chosen[None, :]).to(tl.int32), 1)
    first = tl.cumsum(counts, 0) - counts
    tiles = (counts + ROWS - 1) // ROWS
    tile = tl.cumsum(tiles, 0) - tiles
    total = tl.sum(tiles, 0)
    for begin in range(0, T, CHUNK):
        at = begin + lanes
        tl.store(tiles_ptr + 3 * at, tl.full((CHUNK,), -1, tl.int32), mask=(at >= total) & (at < T))
    for i in range(0, MOST):
        to_ptr, live = tiles_ptr + 3 * (tile + i), i < tiles
        tl.store(to_ptr, expert, mask=live)
        tl.store(to_ptr + 1, first + i * ROWS, mask=live)
        tl.store(to_ptr + 2, tl.minimum(counts - i * ROWS, ROWS), mask=live)
    for begin in range(0, V, CHUNK):
        visit = begin + lanes
        chosen = tl.load(experts_ptr + visit, mask=visit < V, other=-1)
        same = (expert[:, None] == chosen[None, :]).to(tl.int32)
        place = tl.sum(same * (first[:, None] + tl.cumsum(same, 1) - 1), 0)
        tl.store(order_ptr + place, visit, mask=visit < V)
        first += tl.sum(same, 1)


@triton.jit
def join(
    out_ptr,  # [V, D]
    factors_ptr,  # [V]
    residual_ptr,  # [M, D] or None
    y_ptr,  # [M, D]
    D: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add a row's visits, times their factors, in order, and the residual."""
    wait_for_predecessor(PDL)
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(CHOSEN):
        visit = (row * CHOSEN + i).to(tl.int64)
        out = tl.load(out_ptr + visit * D + at, mask=at < D, other=0.0).to(tl.float32)
        acc += out * tl.load(factors_ptr + visit)
    to = row.to(tl.int64) * D + at
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + to, mask=at < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + to, acc.to(y_ptr.dtype.element_ty), mask=at < D)


def num_tiles(rows: int, experts: int, chosen: int) -> int:
    """Return the most tiles that rows can have: one for each expert with visits, and one for each 16 further visits."""
    return min(rows * chosen, experts + rows * chosen // ROWS)


def expert_tile(find: Callable[[int, int], Tile], outputs: int, inputs: int, chosen: int) -> Tile:
    """Return the tile of one product of experts: that of the weights which a row reads, of which K is not split.

    `find` returns the tile of weights [outputs, inputs].
    """
    return replace(find(outputs * chosen, inputs), split=1)


def block_tiles(index: int | None, blocks: ExpertBlocks, inputs: int, chosen: int) -> list[Tile]:
    """Return the same for the parts of weights in blocks."""
    tiles = []
    for kind, outputs in zip(blocks.types, blocks.outputs, strict=True):
        _, units, words = FORMS[kind].records(outputs, inputs)
        tiles.append(replace(block_tile(index, outputs * chosen, units, FORMS[kind].unit, 4 * words), split=1))
    return tiles


def choose_experts(
    scores_MW: Tensor,
    bias_E: Tensor | None,
    chosen: int,
    num_experts: int,
    *,
    normalised: bool,
    scale: float,
    sum_eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the numbers, int32 [M, k], and factors, float32 [M, k], of rows' experts, whose scores come first."""
    M, W = scores_MW.shape
    experts_Mk = torch.empty(M, chosen, dtype=torch.int32, device=scores_MW.device)
    factors_Mk = torch.empty(M, chosen, dtype=torch.float32, device=scores_MW.device)
    choose[(M,)](
        scores_MW, bias_E, experts_Mk, factors_Mk, scale, sum_eps,
        W=W, E=num_experts, CHOSEN=chosen, NORMALISED=normalised, SIZE=triton.next_power_of_2(num_experts),
        num_warps=1, **launch_options(scores_MW.device),
    )  # fmt: skip
    return experts_Mk, factors_Mk


def group_visits(experts_Mk: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return tiles, int32 [T, 3], and visits by expert, int32 [V]; see `row_gemm`."""
    M, k = experts_Mk.shape
    T = num_tiles(M, num_experts, k)
    tiles_T3 = torch.empty(T, 3, dtype=torch.int32, device=experts_Mk.device)
    order_V = torch.empty(M * k, dtype=torch.int32, device=experts_Mk.device)
    group[(1,)](
        experts_Mk, tiles_T3, order_V, M * k, T, triton.cdiv(M, ROWS), SIZE=triton.next_power_of_2(num_experts),
        CHUNK=_CHUNK, ROWS=ROWS, num_warps=4, **launch_options(experts_Mk.device),
    )  # fmt: skip
    return tiles_T3, order_V


def multiply_experts(
    x: Tensor,
    tiles_T3: Tensor,
    order_V: Tensor,
    *,
    weight_EWK: Tensor,
    tile: Tile,
    chosen: int,
    bias_EW: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: str = "",
) -> Tensor:
    """Return [V, N]: visits by expert, of rows x [M, K]; if `chosen` is -1, by number, of visits x [V, K] by expert."""
    _, W, K = weight_EWK.shape
    N = W // 2 if gated else W
    y_VN = x.new_empty(len(order_V), N)
    grid = (len(tiles_T3), triton.cdiv(N, tile.outputs // 2 if gated else tile.outputs), 1)

    def run(stages: int) -> None:
        row_gemm[grid](
            x, weight_EWK, y_VN, bias_EW, norm, None, None, None, None, tiles_T3, order_V, len(x), N, eps, K=K,
            COLUMNS=K, GROUP=0, GATED=gated, ROWS=ROWS, BN=tile.outputs, BK=tile.inputs, SPLIT=1, STAGES=stages,
            PACKED_MATH=x.is_cuda and x.dtype != torch.float32, CHOSEN=chosen, num_warps=tile.warps, num_stages=stages,
            **launch_options(x.device),
        )  # fmt: skip

    with_room(run, tile.stages, (x.device, "experts", tile, gated))
    return y_VN


def multiply_expert_blocks(
    x: Tensor,
    tiles_T3: Tensor,
    order_V: Tensor,
    *,
    blocks: ExpertBlocks,
    tiles: Sequence[Tile],
    chosen: int,
    bias_EW: Tensor | None = None,
    gated: str = "",
) -> Tensor:
    """Return what `multiply_experts` does, of weights in blocks; `tiles`: one for each part."""
    outputs, K = blocks.out_features, x.shape[-1]
    in_one = gated if len(blocks.types) == 1 else ""  # gate and up of two types have two launches, and no gate in them
    y_VN = x.new_empty(len(order_V), outputs // 2 if in_one else outputs)
    visits = Visits(tiles_T3, order_V, chosen, blocks.words_EX.shape[1], outputs)
    begin = first = 0
    for kind, rows, tile in zip(blocks.types, blocks.outputs, tiles, strict=True):
        form, num = FORMS[kind], rows // 2 if in_one else rows
        words = blocks.words_EX[:, begin:] if begin else blocks.words_EX
        given = partial(multiply_blocks, x, words, form, y_VN, first, num, bias=bias_EW, gated=in_one, visits=visits)

        def run(stages: int, given=given, tile=tile) -> None:
            given(tile=replace(tile, stages=stages))

        with_room(run, tile.stages, (x.device, "experts", kind, tile, in_one))
        begin, first = begin + prod(form.records(rows, K)), first + num
    return y_VN if in_one == gated else compose(lambda y: y, y_VN, gated=gated)


def expert_mlp(
    x_MD: Tensor,
    experts_Mk: Tensor,
    factors_Mk: Tensor,
    num_experts: int,
    gate_up: Callable[..., Tensor],
    down: Callable[..., Tensor],
    *,
    gated: str,
    residual_MD: Tensor | None = None,
) -> Tensor:
    """Return residual + the sum of the rows' experts [M, D]: down(act(gate(x)) * up(x)), times factors.

    `gate_up`, `down`: `multiply_experts` or `multiply_expert_blocks`, with their weights.
    """
    (M, k), D = experts_Mk.shape, x_MD.shape[1]
    tiles_T3, order_V = group_visits(experts_Mk, num_experts)
    hidden_VI = gate_up(x_MD, tiles_T3, order_V, chosen=k, gated=gated)
    out_VD = down(hidden_VI, tiles_T3, order_V, chosen=-1)
    y_MD = torch.empty_like(x_MD)
    join[(M, triton.cdiv(D, _BLOCK))](
        out_VD, factors_Mk, residual_MD, y_MD, D=D, CHOSEN=k, BLOCK=_BLOCK, num_warps=4, **launch_options(x_MD.device)
    )
    return y_MD
