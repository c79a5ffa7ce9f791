"""Mixtures of experts under Triton's interpreter or on a GPU: values against float64, what is read, and bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from compile.block_linear import BLOCK_TYPES, BlockPart
from compile.cuda.block_form import ExpertBlocks
from compile.cuda.block_linear import BlockRowLinear
from compile.cuda.experts import (
    block_tiles,
    choose_experts,
    expert_mlp,
    expert_tile,
    group_visits,
    multiply_expert_blocks,
    multiply_experts,
    num_tiles,
)
from compile.cuda.gemm_config import tile_of
from tests.helpers.block_parts import random_part, values

EPSILON = {torch.float32: 4e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
IN_ALL = pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.bfloat16, torch.float16))]
)
D, E, SIZE, CHOSEN = 48, 10, 32, 3


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def gpu() -> int | None:
    """Index of the GPU that kernels run on; None under the interpreter."""
    return torch.get_default_device().index


def weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (torch.randn(E, 2 * SIZE, D) / 7).to(dtype), (torch.randn(E, D, SIZE) / 6).to(dtype)


def products(gate_up: Tensor, down: Tensor, **around: Any) -> tuple[Callable[..., Tensor], ...]:
    find = partial(tile_of, gpu(), bits=8 * gate_up.dtype.itemsize)
    tiles = [expert_tile(find, *each.shape[1:], CHOSEN) for each in (gate_up, down)]
    return (
        partial(multiply_experts, weight_EWK=gate_up, tile=tiles[0], **around),
        partial(multiply_experts, weight_EWK=down, tile=tiles[1]),
    )


def choices(rows: int) -> tuple[Tensor, Tensor]:
    experts = torch.stack([torch.randperm(E)[:CHOSEN].sort().values for _ in range(rows)]).to(torch.int32)
    return experts, torch.rand(rows, CHOSEN)


def formula(
    x: Tensor, experts: Tensor, factors: Tensor, gate_up: Tensor, down: Tensor, norm: Tensor, residual: Tensor
) -> Tensor:
    """The same in float64, expert by expert."""
    x, factors, gate_up, down, norm = (each.double() for each in (x, factors, gate_up, down, norm))
    h = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm
    y = residual.double()
    for expert in range(E):
        gate, up = (h @ gate_up[expert].t()).chunk(2, -1)
        out = (F.silu(gate) * up) @ down[expert].t()
        y = y + out * (factors * (experts == expert)).sum(-1, keepdim=True)
    return y


@IN_ALL
def test_values_and_bits_of_rows(dtype: torch.dtype) -> None:
    """37 rows fill several tiles of an expert; alone, in pieces and in another order they have the same bits."""
    gate_up, down = weights(dtype)
    x, norm = torch.randn(37, D).to(dtype), (1 + 0.3 * torch.randn(D)).to(dtype)
    experts, factors = choices(37)
    experts[:20] = torch.tensor([0, 4, 9], dtype=torch.int32)
    residual = torch.randn(37, D).to(dtype)

    def run(rows: Tensor) -> Tensor:
        both = products(gate_up, down, norm=norm, eps=1e-5)
        return expert_mlp(*(x[rows], experts[rows], factors[rows], E, *both), gated="silu", residual_MD=residual[rows])

    whole = run(torch.arange(37))
    want = formula(x, experts, factors, gate_up, down, norm, residual)
    assert (whole.double() - want).norm() / want.norm() < EPSILON[dtype]
    for rows in (torch.tensor([5]), torch.arange(17, 37), torch.randperm(37)):
        assert torch.equal(run(rows), whole[rows])
    gate_up[[1, 7]], down[[1, 7]] = float("nan"), float("nan")
    unread = [row for row in range(37) if not {1, 7} & set(experts[row].tolist())]
    assert torch.equal(run(torch.tensor(unread)), whole[unread]), "experts that nobody chose were read"


def stored(parts: list[list[BlockPart]], dtype: torch.dtype) -> tuple[ExpertBlocks, Tensor]:
    """Records of experts with these parts, and their numbers in float64."""
    device = torch.get_default_device()
    linears = [BlockRowLinear(each, None, device, 16, dtype=dtype) for each in parts]
    blocks = ExpertBlocks(torch.stack([each.weight for each in linears]), linears[0].types, linears[0].outputs)
    numbers = [torch.cat([values(part) for part in each]) for each in parts]
    return blocks, torch.stack(numbers).double().to(device)


def inputs_for(weight: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Rows whose products are around 1: of random blocks they may exceed the range of float16 otherwise."""
    K = weight.shape[-1]
    return (torch.randn(rows, K) / (K * weight.square().mean()).sqrt().float()).to(dtype)


FAST = ("Q4_K", "Q6_K", "MXFP4")
KINDS = [(kind,) for kind in BLOCK_TYPES] + [("Q4_K", "Q6_K")]


@pytest.mark.parametrize(
    "kinds", [pytest.param(kinds, marks=() if kinds[0] in FAST else pytest.mark.slow) for kinds in KINDS]
)
@IN_ALL
def test_stored_experts(kinds: tuple[str, ...], dtype: torch.dtype) -> None:
    """Blocks as the file has them, with biases; gate and up of two types, too. Bits are those of the row alone."""
    K, gate, up = 256, kinds[0], kinds[-1]
    gate_up, gate_up_EWK = stored(
        [[random_part(gate, 32, K, 3 * i), random_part(up, 32, K, 3 * i + 1)] for i in range(4)], dtype
    )
    down, down_EDI = stored([[random_part(gate, 48, K, 3 * i + 2)] for i in range(4)], dtype)
    assert gate_up.types == [*kinds] and gate_up_EWK.shape == (4, 64, K)
    experts = torch.tensor([[0, 2], [1, 2], [0, 3]], dtype=torch.int32)[torch.arange(20) % 3]
    visits = group_visits(experts, 4)
    bias = torch.randn(4, 64).to(dtype)
    x = inputs_for(gate_up_EWK, 20, dtype)

    def up_of(rows: Tensor) -> Tensor:
        return multiply_expert_blocks(
            *(x[rows], *group_visits(experts[rows], 4)),
            blocks=gate_up,
            tiles=block_tiles(gpu(), gate_up, K, 2),
            chosen=2,
            bias_EW=bias,
            gated="silu",
        )

    order = visits[1].long()
    gates, ups = (
        torch.einsum("vk,vwk->vw", x.double()[order // 2], gate_up_EWK[experts.flatten()[order].long()])
        .add(bias.double()[experts.flatten()[order].long()])
        .chunk(2, -1)
    )
    got, want = up_of(torch.arange(20)), F.silu(gates) * ups
    assert (got.double() - want).norm() / want.norm() < 2 * EPSILON[dtype]
    for row in (0, 7, 19):  # alone, in the order of experts
        mine = [(order // 2 == row).nonzero().flatten()[i] for i in range(2)]
        assert torch.equal(up_of(torch.tensor([row])), got[torch.stack(mine)])
    hidden = inputs_for(down_EDI, 40, dtype)
    out = multiply_expert_blocks(hidden, *visits, blocks=down, tiles=block_tiles(gpu(), down, K, 2), chosen=-1)
    chosen = experts.flatten()[order].long()
    by_expert = torch.einsum("vk,vdk->vd", hidden.double(), down_EDI[chosen])
    wanted = torch.empty_like(by_expert).index_copy_(0, order, by_expert)
    assert (out.double() - wanted).norm() / wanted.norm() < EPSILON[dtype]


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 60])
def test_visits_are_grouped_in_order(rows: int) -> None:
    experts, _ = choices(rows)
    experts[::2] = torch.tensor([2, 3, 8], dtype=torch.int32)
    tiles, order = group_visits(experts, E)
    assert order.tolist() == experts.flatten().argsort(stable=True).tolist()
    assert len(tiles) == num_tiles(rows, E, CHOSEN)
    found = []
    for expert, first, count in tiles.tolist():
        if expert >= 0:
            assert 0 < count <= 16 and (experts.flatten()[order[first : first + count]] == expert).all()
            found += range(first, first + count)
    assert sorted(found) == list(range(rows * CHOSEN)), "each visit is in one tile"


@pytest.mark.parametrize("has_bias", [False, True])
def test_choices(has_bias: bool) -> None:
    """Of equal probabilities the lowest experts count; rows of NaN choose experts that exist."""
    scores, bias = torch.randn(8, E), torch.randn(E) / 4 if has_bias else None
    scores[1], scores[2] = 0.0, float("nan")
    if bias is not None:
        bias[:5] = 0.1
    probs = scores.double().sigmoid() if has_bias else scores.double().softmax(-1)
    by = probs if bias is None else probs + bias
    experts, factors = choose_experts(scores, bias, CHOSEN, scores.shape[1], normalised=True, scale=1.5, sum_eps=0.0)
    for row in (0, 1, *range(3, 8)):
        want = by[row].sort(descending=True, stable=True).indices[:CHOSEN].sort().values
        assert experts[row].tolist() == want.tolist()
        torch.testing.assert_close(factors[row].double(), 1.5 * probs[row, want] / probs[row, want].sum())
    assert experts[2].tolist() == [0, 1, 2] and factors[2].isnan().all()
