"""The kernel that finds low-bit codes, against the hqq package."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compile.hqq_solver import solve_hqq
from quant.formats.hqq.solver import solve
from quant.quantized_weight import QuantizedWeight

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def by_kernel(weight: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    q, scale, zero = solve_hqq(weight, bits, group_size)
    return QuantizedWeight(q=q, scale=scale, zero=zero, bits=bits, group_size=group_size)


def random_weight(N: int, K: int, std: float = 0.02) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(N)) * std + 0.1 * std


def assert_like_hqq(weight: Tensor, bits: int, group_size: int) -> None:
    ours, theirs = by_kernel(weight, bits, group_size), solve(weight, bits, group_size)
    assert (ours.q == theirs.q).float().mean() > 0.999
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=1e-5, atol=0)
    error, wanted = ((solved.dequantize() - weight.float()).abs().mean() for solved in (ours, theirs))
    assert error <= 1.001 * wanted + 1e-9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (4, 32), (3, 128), (2, 256)])
def test_codes_are_those_of_hqq(bits: int, group_size: int, dtype: torch.dtype) -> None:
    assert_like_hqq(random_weight(130, 512).to(dtype), bits, group_size)


def test_rows_longer_than_a_block() -> None:
    assert_like_hqq(random_weight(3, 2**15 + 64), 4, 64)


def test_errors_beyond_what_the_norm_takes() -> None:
    assert_like_hqq(random_weight(64, 256, std=5.0), 3, 64)


def test_groups_of_one_value_and_outliers() -> None:
    weight = random_weight(32, 256)
    weight[1], weight[2], weight[3, :64], weight[4, 7] = 0.0, 7.0, 1e-6, 30.0
    assert_like_hqq(weight, 4, 64)
    solved = by_kernel(weight, 4, 64).dequantize()
    assert torch.equal(solved[1], weight[1]) and torch.equal(solved[2], weight[2])


def test_codes_do_not_depend_on_threads() -> None:
    weight, before = random_weight(300, 512), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = solve_hqq(weight, 4, 64)
        torch.set_num_threads(3)
        assert all(map(torch.equal, one, solve_hqq(weight, 4, 64)))
    finally:
        torch.set_num_threads(before)


def test_a_transposed_weight_is_read_as_it_is_meant() -> None:
    weight = random_weight(64, 128)
    assert all(map(torch.equal, solve_hqq(weight, 4, 32), solve_hqq(weight.t().contiguous().t(), 4, 32)))
