"""Quantizing of matrices by CPU kernels: to GGUF blocks (cpu/block_quantize.h), and HQQ (cpu/hqq_solver.h).

Legend: N output features, K input features, G groups of a row.
"""

from __future__ import annotations

from ctypes import byref, c_int64

import torch
from torch import Tensor

from compile.block_linear import BLOCK_TYPES, BlockPart, block_sizes
from compile.block_types import TYPES
from compile.cpp_extension import call

QUANTIZED_TYPES = tuple(name for name, kind in TYPES.items() if kind.quantizes)
"""GGML types that numbers can be quantized to, without statistics of activations."""


def quantize_blocks(weight_NK: Tensor, kind: str) -> BlockPart:
    """Return a matrix as blocks of a type, by ggml's formulas.

    Raises ValueError if rows are no whole blocks, or a value or its scale is not finite.
    """
    N, K = weight_NK.shape
    inputs, num_bytes = block_sizes(kind)
    if kind not in QUANTIZED_TYPES or K % inputs:
        raise ValueError(f"{K} inputs are not whole blocks of {kind}, which have {inputs}")
    if weight_NK.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        weight_NK = weight_NK.float()
    if weight_NK.stride(1) != 1:
        weight_NK = weight_NK.contiguous()
    raw, wrong = torch.empty(N, K // inputs * num_bytes, dtype=torch.uint8), c_int64()
    sizes = weight_NK.stride(0), N, K, BLOCK_TYPES.index(kind), inputs, num_bytes
    call("quantize_blocks", weight_NK.dtype, weight_NK, *sizes, raw, byref(wrong), torch.get_num_threads())
    if wrong.value:
        raise ValueError("it has values that are not finite, or too large for scales in float16")
    return BlockPart(kind, raw)


def solve_hqq(weight_NK: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix on the CPU in groups of a row.

    Half-quadratic quantization (Badri and Shaji 2023). Returns codes (uint8 [N, K], below 2^bits), scales and zeros
    (float32 [N, G]): W = (code - zero) * scale.
    """
    N, K = weight_NK.shape
    assert bits < 8 and K % group_size == 0 and group_size % 16 == 0, (weight_NK.shape, bits, group_size)
    weight_NK = weight_NK.detach().contiguous()
    codes_NK = torch.empty(N, K, dtype=torch.uint8)
    scales_NG, zeros_NG = (torch.empty(N, K // group_size) for _ in range(2))
    tensors = weight_NK, codes_NK, scales_NG, zeros_NG
    call("solve_hqq", weight_NK.dtype, *tensors, N, K, group_size, bits, torch.get_num_threads())
    return codes_NK, scales_NG, zeros_NG
