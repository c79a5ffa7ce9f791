"""Linears with bfloat16 weights have the bits of float32 ones with the same values."""

from __future__ import annotations

import pytest
import torch

from compile.block_linear import WIDENED, BlockEmbedding, BlockPart
from compile.huge_pages import HugePageArena
from compile.linear import NotFinite, PackedLinear
from compile.native_structs import LinearStruct
from compile.widened_linear import WidenedLinear


def weights(N: int, K: int) -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("size", [(16, 32), (70, 96), (48, 33), (1, 5)])
def test_bits_are_those_of_float32_weights(size: tuple[int, int]) -> None:
    plain = weights(*size)
    linear, wide = WidenedLinear(plain, HugePageArena().zeros), PackedLinear(plain.float(), None)
    assert linear.weight.nbytes * 2 == wide.weight.nbytes
    assert torch.equal(linear.unpacked(), plain.float()) and linear.dtype == torch.float32
    x = torch.randn(20, size[1], generator=torch.Generator().manual_seed(1))
    for rows in (1, 2, 3, 9, 17, 20):
        assert torch.equal(linear(x[:rows]), wide(x[:rows]))
        assert torch.equal(linear(x[:rows])[-1], wide(x[rows - 1 : rows])[0])


def test_rows_may_lie_apart() -> None:
    apart = weights(32, 100)[:, 3:67]
    assert torch.equal(WidenedLinear(apart, HugePageArena().zeros).unpacked(), apart.float())
    across = weights(64, 32).t()
    assert torch.equal(WidenedLinear(across, HugePageArena().zeros).unpacked(), across.float())


def test_embeddings_read_its_rows() -> None:
    plain = weights(70, 64)
    linear = WidenedLinear(plain, HugePageArena().zeros)
    embedding, ids = BlockEmbedding(linear, torch.float32, is_head=True), torch.tensor([[3, 69], [0, 17]])
    assert torch.equal(embedding(ids), plain.float()[ids]) and torch.equal(embedding.weight, plain.float())
    assert torch.equal(linear.dequantize(ids), plain.float()[ids])


def test_the_stack_takes_it() -> None:
    linear = WidenedLinear(weights(32, 64), HugePageArena().zeros)
    found = LinearStruct.of(linear)
    assert (found.bits, found.weight, found.bias) == (16, linear.weight.data_ptr(), None)
    assert (found.N, found.K, found.G) == (32, 64, 0)
    part = BlockPart(WIDENED, weights(32, 64))
    assert part.shape == (32, 64) and torch.equal(part.numbers(), weights(32, 64).float())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    plain = weights(16, 32)
    plain[3, 4] = value
    with pytest.raises(NotFinite):
        WidenedLinear(plain, HugePageArena().zeros)
    large = torch.full((16, 32), 2.0**125).bfloat16()
    assert torch.equal(WidenedLinear(large, HugePageArena().zeros).unpacked(), large.float())
