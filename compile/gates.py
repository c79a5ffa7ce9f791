"""Products with the sigmoids of gates, each for some neighbouring numbers of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from compile.op_registry import define_for_triton, runs_triton


def multiply_by_gates(x_BTW: Tensor, gates_BTG: Tensor, residual_BTW: Tensor | None = None) -> Tensor:
    """Return residual + x * sigmoid(gates), a gate for every W / G numbers."""
    if runs_triton(x_BTW.device):
        return torch.ops.sharesd.multiply_by_gates(x_BTW, gates_BTG, residual_BTW)
    y_BTW = (x_BTW.unflatten(-1, (gates_BTG.shape[-1], -1)) * gates_BTG.sigmoid()[..., None]).flatten(-2)
    return y_BTW if residual_BTW is None else residual_BTW + y_BTW


def _multiply_by_gates(x, gates, residual):  # type: ignore[no-untyped-def]
    from compile.cuda.gates import multiply  # imports Triton, which not every machine has

    return multiply(x, gates, residual)


define_for_triton(
    "multiply_by_gates(Tensor x, Tensor gates, Tensor? residual) -> Tensor",
    _multiply_by_gates,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
