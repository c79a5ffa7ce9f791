"""Quantized weights as codes, scales and zeros, between solvers, files and kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedWeight:
    """Quantized weight.

    W = (q - zero) * scale, with a scale and a zero per group of a row.
    """

    q: Tensor
    """uint8 [N, K], one code per weight (not packed), 0..2^bits - 1."""
    scale: Tensor
    """float32 [N, G]."""
    zero: Tensor
    """float32 [N, G]: code of weight 0, often fractional."""
    bits: int
    """Bits per code."""
    group_size: int
    """Weights of a row with one scale and zero: K / G."""

    def to(self, device: torch.device) -> QuantizedWeight:
        parts = {name: getattr(self, name).to(device) for name in ("q", "scale", "zero")}
        return QuantizedWeight(**parts, bits=self.bits, group_size=self.group_size)

    def dequantize(self) -> Tensor:
        """Return the float32 [N, K] matrix."""
        return dequantize(self.q, self.scale, self.zero)


def dequantize(q_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor) -> Tensor:
    """Return the weight [N, K], in the dtype of the scale."""
    q_NGg = q_NK.unflatten(-1, (scale_NG.shape[-1], -1)).to(scale_NG.dtype)
    return ((q_NGg - zero_NG[..., None]) * scale_NG[..., None]).flatten(-2)


def int8_codes(weight: QuantizedWeight) -> Tensor:
    """Return the uint8 codes as int8: code - 128."""
    return (weight.q.to(torch.int16) - 128).to(torch.int8)
