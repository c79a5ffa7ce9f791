"""Quantizing to blocks, against the gguf package's and llama.cpp's quantizers."""

from __future__ import annotations

import hashlib

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from compile.block_linear import BLOCK_TYPES
from compile.block_quantizer import QUANTIZED_TYPES, quantize_blocks
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
    plain = weights(torch.bfloat16)
    wanted = quantize_blocks(plain, kind).raw
    apart = torch.zeros(64, 600, dtype=torch.bfloat16)
    apart[:, :512] = plain
    assert torch.equal(quantize_blocks(apart[:, :512], kind).raw, wanted)
    assert torch.equal(quantize_blocks(plain.double(), kind).raw, wanted)
    assert torch.equal(quantize_blocks(plain.t().contiguous().t(), kind).raw, wanted)


@pytest.mark.parametrize("kind", QUANTIZED_TYPES)
def test_errors_become_smaller_with_more_bits(kind: str) -> None:
    plain = weights(torch.float32)
    values = gguf.dequantize(quantize_blocks(plain, kind).raw.numpy(), ggml_type(kind))
    largest = {"Q8_0": 0.006, "Q6_K": 0.021, "Q5_K": 0.04, "Q5_1": 0.04, "Q5_0": 0.045, "MXFP4": 0.12}.get(kind, 0.09)
    assert np.linalg.norm(values - plain.numpy()) < largest * np.linalg.norm(plain.numpy())


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
