"""Rotary position embeddings (RoPE: Su et al. 2021, arXiv 2104.09864).

Legend: B rows of the batch, T tokens, N heads, d head size, r rotated half (at most d / 2).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_BTNd: Tensor, cos_BTr: Tensor, sin_BTr: Tensor) -> Tensor:
    """Rotate the first 2r entries of every head, in halves (GPT-NeoX order)."""
    r = cos_BTr.shape[-1]
    cos, sin = cos_BTr[:, :, None], sin_BTr[:, :, None]
    a, b, rest = x_BTNd[..., :r], x_BTNd[..., r : 2 * r], x_BTNd[..., 2 * r :]
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat(turned if rest.shape[-1] == 0 else (*turned, rest), dim=-1)
