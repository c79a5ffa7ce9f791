"""Half-quadratic quantization by a CPU kernel, without tensor operations.

Legend: N output features, K input features, G groups of a row.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from compile.cpp_extension import kernel


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
    function = kernel("solve_hqq", weight_NK.dtype, *[c_void_p] * 4, *[c_int64] * 5)
    places = (tensor.data_ptr() for tensor in (weight_NK, codes_NK, scales_NG, zeros_NG))
    function(*places, N, K, group_size, bits, torch.get_num_threads())
    return codes_NK, scales_NG, zeros_NG
