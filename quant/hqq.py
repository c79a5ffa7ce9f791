"""Find codes, scales and zeros for a weight matrix.

Below 8 bits: half-quadratic quantization (HQQ; Badri and Shaji 2023) by the hqq package, along the rows; callers may
bring a quicker solver of the same kind. At 8 bits: one
symmetric scale per row, rounded to nearest. HQQ's affine rows would lower the error of SmolLM2's 8-bit weights from
about 0.9 % to 0.8 % (relative, L2), but torch's int8 kernel is symmetric: every product would need a row sum and a
rank-one update on top.

Legend: N output features, K input features, G groups of a row.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.lazy import lazy_import

# HQQ passes over its block some hundred times: blocks that stay in the processor's cache are three times as fast. Torch
# does not split blocks of this size among its threads: ours share the work without waiting for each other at each step.
_BLOCK_WEIGHTS = {"cpu": 2**15}
_BLOCK_WEIGHTS_ELSEWHERE = 2**24
_ROUNDED = 4096
"""Rows that are rounded at a time: heads have many, and float32 takes four times as much as their codes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight matrix as small integers: W = (q - zero) * scale, group by group along the rows."""

    q: Tensor
    """uint8 [N, K], one code per weight (not packed), 0..2^bits - 1."""
    scale: Tensor
    """float32 [N, G]."""
    zero: Tensor
    """float32 [N, G]: the code that stands for 0, usually not a whole number. 128 at 8 bits."""
    bits: int
    """Bits per code."""
    group_size: int
    """Weights of a row that share a scale and a zero: K / G."""

    def dequantize(self) -> Tensor:
        """The float32 [N, K] matrix that these codes stand for."""
        return dequantize(self.q, self.scale, self.zero)


def dequantize(q_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor) -> Tensor:
    """(q - zero) * scale as [N, K], in the dtype of scale."""
    q_NGg = q_NK.unflatten(-1, (scale_NG.shape[-1], -1)).to(scale_NG.dtype)
    return ((q_NGg - zero_NG[..., None]) * scale_NG[..., None]).flatten(-2)


def solve(weight_NK: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Quantize on the weight's own device. `group_size` must divide K; 8 bits use one group per row instead."""
    weight_NK = weight_NK.detach().contiguous()
    if bits == 8:
        return _round_rows(weight_NK)
    K = weight_NK.shape[1]
    assert K % group_size == 0, (weight_NK.shape, group_size)
    quantize = lazy_import("hqq.core.quantize").Quantizer.quantize

    def solve_block(block_RK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, meta = quantize(
            block_RK.float(),
            nbits=bits,
            group_size=group_size,
            axis=1,
            optimize=True,
            bitpack=False,
            device=block_RK.device,
        )
        scale_RG, zero_RG = (meta[name].reshape(len(block_RK), -1) for name in ("scale", "zero"))
        return q.reshape(block_RK.shape).to(torch.uint8), scale_RG, zero_RG  # as codes at once: a head has many

    block_weights = _BLOCK_WEIGHTS.get(weight_NK.device.type, _BLOCK_WEIGHTS_ELSEWHERE)
    threads = (
        torch.get_num_threads() if weight_NK.device.type == "cpu" else 1
    )  # elsewhere a block keeps the device busy
    with ThreadPoolExecutor(threads) as pool:
        blocks = list(pool.map(solve_block, weight_NK.split(max(1, block_weights // K))))
    # HQQ works in inference mode: clone() makes ordinary tensors of its results.
    q_NK, scale_NG, zero_NG = (torch.cat(parts).clone() for parts in zip(*blocks, strict=True))
    return QuantizedWeight(q=q_NK, scale=scale_NG.float(), zero=zero_NG.float(), bits=bits, group_size=group_size)


def _round_rows(weight_NK: Tensor) -> QuantizedWeight:
    q_NK, scales = torch.empty_like(weight_NK, dtype=torch.uint8), []
    for weight_RK, q_RK in zip(weight_NK.split(_ROUNDED), q_NK.split(_ROUNDED), strict=True):
        wide_RK = weight_RK.float()
        peak_R1 = wide_RK.abs().amax(-1, keepdim=True)
        scales.append(torch.where(peak_R1 > 0, peak_R1 / 127, 1.0))
        q_RK.copy_((wide_RK / scales[-1]).round_().add_(128))
    scale_N1 = torch.cat(scales)
    return QuantizedWeight(
        q=q_NK,
        scale=scale_N1,
        zero=torch.full_like(scale_N1, 128.0),
        bits=8,
        group_size=weight_NK.shape[1],
    )
