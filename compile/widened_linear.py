"""Linears of float32 rows with bfloat16 weights, widened in registers.

Sums are those of float32 weights with the same values, at half the bytes. Legend: N outputs, K inputs.
"""

from __future__ import annotations

from ctypes import byref, c_int64, c_void_p

import torch
from torch import Tensor

from compile.cpp_extension import kernel
from compile.linear import NotFinite, PackedLinear, Zeros, packed_size

_PACK_ARGTYPES = (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64)
_LINEAR_ARGTYPES = (*[c_void_p] * 3, *[c_int64] * 4)
_LANES = 16


class WidenedLinear(PackedLinear):
    """Packed linear without a bias, bfloat16 [N / 16, K, 16, 1]."""

    def __init__(self, weight_NK: Tensor, zeros: Zeros) -> None:
        """Pack bfloat16 weights into memory from `zeros`; raises NotFinite."""
        super().__init__(torch.empty(weight_NK.shape, dtype=torch.float32, device="meta"), None)
        size = packed_size(self.out_features, self.in_features, torch.float32)
        self.weight, self.is_settled = zeros(size, torch.bfloat16), True
        weight_NK = weight_NK if weight_NK.stride(1) == 1 else weight_NK.contiguous()
        finite = c_int64()
        kernel("pack_to_widen", torch.float32, *_PACK_ARGTYPES)(
            weight_NK.data_ptr(),
            weight_NK.stride(0),
            self.weight.data_ptr(),
            *weight_NK.shape,
            byref(finite),
            torch.get_num_threads(),
        )
        if not finite.value:
            raise NotFinite("weights have NaN or infinite values")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def unpacked(self) -> Tensor:
        return super().unpacked().float()

    def dequantize(self, rows: Tensor) -> Tensor:
        """Return the weights of some outputs, float32 [..., K]."""
        return self._decode(rows, torch.float32)

    def _decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight[rows // _LANES, :, rows % _LANES, 0].to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32, f"rows are float32, called with {x.dtype}"
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out_features))
        kernel("widened_linear", torch.float32, *_LINEAR_ARGTYPES)(
            x.data_ptr(),
            self.weight.data_ptr(),
            y.data_ptr(),
            x.numel() // self.in_features,
            self.out_features,
            self.in_features,
            torch.get_num_threads(),
        )
        return y
