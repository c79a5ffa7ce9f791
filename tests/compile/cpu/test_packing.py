"""Packing of weights in the pass that reads them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compile.huge_pages import HugePageArena
from compile.linear import LAYOUT, NotFinite, PackedLinear, pack_rows, packed_size

EACH_DTYPE = pytest.mark.parametrize("dtype", LAYOUT)


def random(N: int, K: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(N), dtype=torch.float64).to(dtype)


@EACH_DTYPE
@pytest.mark.parametrize("rows", [(32, 16, 16), (16, 5), (7, 9, 3)])
def test_a_linear_of_parts_equals_one_of_all_rows(rows: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = random(sum(rows), 21, dtype)
    parts = [part.double() for part in weight.split(rows)]
    packed = PackedLinear.from_parts(parts, None, dtype=dtype, zeros=HugePageArena().zeros)
    assert packed.is_settled and torch.equal(packed.weight, PackedLinear(weight, None).weight)
    assert torch.equal(packed.unpacked(), weight)
    columns = [part.t().contiguous().t() for part in parts]
    assert torch.equal(
        PackedLinear.from_parts(columns, None, dtype=dtype, zeros=HugePageArena().zeros).weight, packed.weight
    )


@EACH_DTYPE
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_packing_finds_what_is_no_number(bad: float, dtype: torch.dtype) -> None:
    weight = random(20, 7, dtype)
    largest = torch.finfo(dtype).max
    for n, k in ((0, 0), (19, 6), (15, 5)):
        weight[n, k] = largest
        pack_rows(weight, torch.empty(packed_size(20, 7, dtype), dtype=dtype))
        weight[n, k] = bad
        with pytest.raises(NotFinite):
            pack_rows(weight, torch.empty(packed_size(20, 7, dtype), dtype=dtype))
        weight[n, k] = 0
