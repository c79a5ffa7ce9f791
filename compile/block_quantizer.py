"""Quantizing of matrices to GGUF blocks (cpu/block_quantize.h)."""

from __future__ import annotations

from ctypes import byref, c_int64, c_void_p

import torch
from torch import Tensor

from compile.block_linear import BLOCK_TYPES, BlockPart, block_sizes
from compile.block_types import TYPES
from compile.cpp_extension import kernel

QUANTIZED_TYPES = tuple(name for name, kind in TYPES.items() if kind.quantizes)
"""GGML types that numbers can be quantized to, without statistics of activations."""
_ARGTYPES = (c_void_p, *[c_int64] * 6, c_void_p, c_void_p, c_int64)


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
    kernel("quantize_blocks", weight_NK.dtype, *_ARGTYPES)(
        weight_NK.data_ptr(),
        weight_NK.stride(0),
        N,
        K,
        BLOCK_TYPES.index(kind),
        inputs,
        num_bytes,
        raw.data_ptr(),
        byref(wrong),
        torch.get_num_threads(),
    )
    if wrong.value:
        raise ValueError("it has values that are not finite, or too large for scales in float16")
    return BlockPart(kind, raw)
