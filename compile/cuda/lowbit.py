"""Linears of 4 or 8 bits for drafts on CUDA.

Drafts are reproducible and do not depend on the width, since no sum uses atomics. Codes are dequantized in registers.
Weights are packed once, for drafts of several rows (`QuantizedRowLinear`) or of one (`StreamLinear`). Both take any
number of rows.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compile.cuda import stream
from compile.cuda.linear import RowLinearBase, StepLinear

GROUP_SIZES = (32, 64, 128, 256)
"""Inputs that share a scale and an offset, with 4 bits."""
_PACKED_ROWS = 4096
"""Rows packed at a time: int32 takes four times the memory."""


class QuantizedRowLinear(RowLinearBase):
    """Linear with weights of 4 bits in groups, or 8 by row.

    w = (code - 8) * scale + offset with 4 bits, (code - 128) * scale with 8. Scales and offsets of 4 bits are rounded
    to the dtype of the inputs; float32 inputs get them as bfloat16.
    """

    def __init__(
        self,
        codes_NK: Tensor,
        scale_NG: Tensor,
        offset_NG: Tensor,
        bias_N: Tensor | None,
        bits: int,
        dtype: torch.dtype,
        max_rows: int,
        batch: int = 1,
    ) -> None:
        """`codes_NK` is uint8, below 16 with 4 bits. ValueError for other groups."""
        N, K = codes_NK.shape
        super().__init__(N, K, codes_NK.device, max_rows, batch)
        self.factor_dtype = torch.bfloat16 if dtype == torch.float32 else dtype
        if bits == 8:
            weight, scale = (codes_NK ^ 128).view(torch.int8), scale_NG.float().flatten()  # code - 128
        else:
            self.group_size = K // scale_NG.shape[1]
            if self.group_size not in GROUP_SIZES:
                raise ValueError(f"groups have {self.group_size} inputs; use one of {', '.join(map(str, GROUP_SIZES))}")
            weight, scale = pack4(codes_NK, self.group_size), pack_factors(scale_NG, offset_NG, self.factor_dtype)
            self.takes_norm = False  # with so few bytes to read, a norm in every program takes a third of the time
        self.register_buffer("weight", weight.contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias_N)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        assert self.scale is not None
        return self.weight.nbytes + self.scale.nbytes

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weights [N, K]."""
        assert self.scale is not None
        if self.group_size == 0:
            return (self.weight.float() * self.scale[:, None]).to(dtype)
        factors_NG = self.scale.view(self.factor_dtype).view(*self.scale.shape, 2).transpose(0, 1).float()
        codes_NGg = unpack4(self.weight, self.group_size)[:, : self.in_features].unflatten(1, (-1, self.group_size))
        return ((codes_NGg - 8) * factors_NG[..., :1] + factors_NG[..., 1:]).to(dtype).flatten(1)


class StreamLinear(StepLinear):
    """Linear with weights of 4 bits in groups, by `stream.cu`; w = (code - 8) * scale + offset.

    Inputs are bfloat16. Each row is a product of its own, as fast as the memory.
    """

    def __init__(
        self, codes_NK: Tensor, scale_NG: Tensor, offset_NG: Tensor, bias_N: Tensor | None, max_rows: int
    ) -> None:
        """`codes_NK` is uint8 below 16, of a shape for which `stream.obstacle` is None."""
        N, K = codes_NK.shape
        super().__init__(N, K, max_rows)
        self.group_size = K // scale_NG.shape[1]
        self.register_buffer("weight", stream.pack(codes_NK, scale_NG, offset_NG))
        self.register_buffer("bias", bias_N)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        return self.weight.nbytes

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weights [N, K]."""
        codes_NK, scale_NG, offset_NG = stream.unpack(self.weight, self.group_size)
        codes_NGg = codes_NK.float().unflatten(1, (-1, self.group_size))
        filled_NGg = (codes_NGg - 8) * scale_NG.float()[..., None] + offset_NG.float()[..., None]
        return filled_NGg.to(dtype).flatten(1)[:, : self.in_features]

    def product(self, x: Tensor, norm: Tensor | None, eps: float, residual: Tensor | None, gated: str) -> Tensor:
        if norm is not None and norm.dtype != x.dtype:  # Gemma's are float32
            x, norm = torch.ops.sharesd.row_norm(x, norm, eps), None
        return torch.ops.sharesd.stream_linear(x, self.weight, self.bias, norm, eps, residual, gated, self.group_size)


def pack4(codes_NK: Tensor, group: int) -> Tensor:
    """Pack codes into int16 [N, K / 4], padded with zeros.

    Four groups are side by side. The first group is in the lowest bits of `group` columns.
    """
    shifts = torch.tensor([1, 1 << 4, 1 << 8, 1 << 12], dtype=torch.int32, device=codes_NK.device)
    missing, words = -codes_NK.shape[1] % (4 * group), []
    for codes_RK in codes_NK.split(_PACKED_ROWS):
        padded_RB4g = F.pad(codes_RK, (0, missing)).to(torch.int32).unflatten(1, (-1, 4, group))
        words.append((padded_RB4g * shifts[:, None]).sum(2, dtype=torch.int32).to(torch.int16).flatten(1))
    return torch.cat(words)


def unpack4(words: Tensor, group: int) -> Tensor:
    """Return the codes of `pack4`, int32 [N, K], with padding."""
    words_NB1g = words.to(torch.int32).unflatten(1, (-1, 1, group))
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device)
    return ((words_NB1g >> shifts[:, None]) & 15).flatten(1)


def pack_factors(scale_NG: Tensor, offset_NG: Tensor, half: torch.dtype) -> Tensor:
    """Pack factors into int32 [G, N], scale in the lower half."""
    return torch.stack([scale_NG.t(), offset_NG.t()], 2).to(half).contiguous().view(torch.int32)[..., 0]
