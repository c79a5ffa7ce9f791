"""Rounding to nearest at 8 bits: one symmetric scale per row.

HQQ's affine rows would lower the error of SmolLM2's 8-bit weights from about 0.9 % to 0.8 % (relative, L2), but torch's
int8 kernel is symmetric: every product would need a row sum and a rank-one update on top.

Legend: N output features, K input features, R rows of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.quantized_weight import QuantizedWeight

_BLOCK_ROWS = 4096
"""Rows rounded at a time, to limit the memory for LM heads."""


def round_rows(weight_NK: Tensor) -> QuantizedWeight:
    """Quantize each row by its largest magnitude."""
    q_NK, scales = torch.empty_like(weight_NK, dtype=torch.uint8), []
    for weight_RK, q_RK in zip(weight_NK.split(_BLOCK_ROWS), q_NK.split(_BLOCK_ROWS), strict=True):
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
