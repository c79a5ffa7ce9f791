"""Full-precision linears of any model.

They are torch's, transformers' Conv1D (GPT-2), which stores its weight transposed, or packed ones: modules with
`out_features`, `in_features`, `dtype`, and `unpacked()`, which returns the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" or _is_packed(module)


def has_halves(linear: nn.Module) -> bool:
    """True if codes are stored as halves, see `upper_halves` of the linear."""
    return getattr(linear, "has_halves", False)


def weight_NK(linear: Any) -> Tensor:
    """Return the weight [N, K]; of a packed linear, a copy."""
    if _is_packed(linear):
        return linear.unpacked()
    weight = linear.weight.detach()
    return weight if isinstance(linear, nn.Linear) else weight.t()


def weight_shape(linear: Any) -> Tensor:
    """Return the weight, on the meta device if it is packed."""
    if not _is_packed(linear):
        return weight_NK(linear)
    size = linear.out_features, linear.in_features
    return torch.empty(size, dtype=linear.dtype, device="meta")


def device_of(linear: Any) -> torch.device:
    return linear.weight.device


def bias_of(linear: nn.Module) -> Tensor | None:
    bias = linear.bias
    assert bias is None or isinstance(bias, Tensor)
    return bias


def _is_packed(module: nn.Module) -> bool:
    return hasattr(module, "unpacked")
