"""Quantizing, against the gguf package's and llama.cpp's quantizers to blocks, and the hqq package's solver."""

from __future__ import annotations

import hashlib

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from compile.block_linear import BLOCK_TYPES
from compile.quantizers import QUANTIZED_TYPES, quantize_blocks, solve_hqq
from quant.formats.hqq.solver import solve
from quant.quantized_weight import QuantizedWeight
from tests.helpers.block_parts import ggml_type

BY_GGUF = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4")
BY_LLAMA_CPP = {"Q6_K": "5c4dae995e55539a", "Q5_K": "9d0ad6c108acccdf", "Q4_K": "c27d141f74f724ca"}
"""First digits of the SHA-256 of `even_weights`, quantized by llama.cpp's quantize_q6_K and so on."""


def weights(dtype: torch.dtype) -> Tensor:
    """Weights of many sizes, and rows of one sign, of one value, of zeros, of equal extremes."""
    dice = torch.Generator().manual_seed(0)
    some = torch.randn(64, 512, generator=dice) * torch.rand(64, 1, generator=dice) * 0.1
    some[0], some[1], some[2, :32], some[3], some[4] = 0, 0.25, 0, some[3].abs(), -some[4].abs()
    some[5], some[6] = torch.tensor([1.0, -1.0]).repeat(256), some[6] * 1e-8
    return some.to(dtype)


def even_weights() -> Tensor:
    """Weights that every machine computes alike."""
    steps = np.arange(4 * 512, dtype=np.uint64) * 2654435761 % 2**32
    values = (steps / 2**32 - 0.5).astype(np.float32).reshape(4, 512)
    return torch.from_numpy(values * np.abs(values) * np.float32(0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", BY_GGUF)
def test_values_are_those_of_the_gguf_package(kind: str, dtype: torch.dtype) -> None:
    plain = weights(dtype)
    part = quantize_blocks(plain, kind)
    wanted = gguf.dequantize(gguf.quantize(plain.float().numpy(), ggml_type(kind)), ggml_type(kind))
    assert part.type == kind
    assert np.array_equal(gguf.dequantize(part.raw.numpy(), ggml_type(kind)), wanted)


@pytest.mark.parametrize("kind", BY_LLAMA_CPP)
def test_bytes_are_those_of_llama_cpp(kind: str) -> None:
    blocks = quantize_blocks(even_weights(), kind).raw.numpy().tobytes()
    assert hashlib.sha256(blocks).hexdigest()[:16] == BY_LLAMA_CPP[kind]


@pytest.mark.parametrize("kind", QUANTIZED_TYPES)
def test_rows_may_lie_apart_and_have_many_threads(kind: str) -> None:
    """Errors become smaller with more bits."""
    plain = weights(torch.bfloat16)
    wanted = quantize_blocks(plain, kind).raw
    error = gguf.dequantize(wanted.numpy(), ggml_type(kind)) - plain.float().numpy()
    largest = {"Q8_0": 0.006, "Q6_K": 0.021, "Q5_K": 0.04, "Q5_1": 0.04, "Q5_0": 0.045, "MXFP4": 0.12}.get(kind, 0.09)
    assert np.linalg.norm(error) < largest * plain.float().norm().item()
    apart = torch.zeros(64, 600, dtype=torch.bfloat16)
    apart[:, :512] = plain
    torch.set_num_threads(3)
    for same in (apart[:, :512], plain.double(), plain.t().contiguous().t()):
        assert torch.equal(quantize_blocks(same, kind).raw, wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("kind", QUANTIZED_TYPES)
def test_values_that_no_scale_holds_are_refused(kind: str, value: float) -> None:
    plain = weights(torch.float32)
    plain[9, 300] = value
    if kind == "MXFP4" and value == 3e38:  # whose scales are powers of two
        assert np.isfinite(gguf.dequantize(quantize_blocks(plain, kind).raw.numpy(), ggml_type(kind))).all()
        return
    with pytest.raises(ValueError, match="not finite, or too large for scales in float16"):
        quantize_blocks(plain, kind)


def test_rows_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="96 inputs are not whole blocks of Q4_K, which have 256"):
        quantize_blocks(torch.zeros(4, 96), "Q4_K")
    assert set(QUANTIZED_TYPES) < set(BLOCK_TYPES)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (4, 32), (3, 128), (2, 256)])
def test_codes_are_those_of_hqq(bits: int, group_size: int, dtype: torch.dtype) -> None:
    assert_like_hqq(random_weight(130, 512).to(dtype), bits, group_size)


def test_rows_longer_than_a_block_and_errors_beyond_what_the_norm_takes() -> None:
    assert_like_hqq(random_weight(3, 2**15 + 64), 4, 64)
    assert_like_hqq(random_weight(64, 256, std=5.0), 3, 64)


def test_groups_of_one_value_and_outliers() -> None:
    weight = random_weight(32, 256)
    weight[1], weight[2], weight[3, :64], weight[4, 7] = 0.0, 7.0, 1e-6, 30.0
    assert_like_hqq(weight, 4, 64)
    solved = by_kernel(weight, 4, 64).dequantize()
    assert torch.equal(solved[1], weight[1]) and torch.equal(solved[2], weight[2])


def test_codes_do_not_depend_on_threads_or_strides() -> None:
    weight = random_weight(300, 512)
    one = solve_hqq(weight, 4, 64)
    torch.set_num_threads(3)
    for same in (weight, weight.t().contiguous().t()):
        assert all(map(torch.equal, one, solve_hqq(same, 4, 64)))
