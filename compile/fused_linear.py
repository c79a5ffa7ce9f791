"""Linear with norm, gate and residual, in one launch if supported; products with the sigmoids of gates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from compile.activations import ACTIVATIONS, SWIGLU_OAI
from compile.op_registry import define_for_triton, runs_triton

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = dict(
    zip(ACTIVATIONS[:-1], (F.silu, F.gelu, partial(F.gelu, approximate="tanh")), strict=True)
)


def project(
    linear: Callable[..., Tensor],
    x: Tensor,
    *,
    norm: Callable[[Tensor], Tensor] | None = None,
    gated: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """Return residual + linear(norm(x)), gated by an activation's name if `gated`.

    Gated outputs are act(first half) * second half, except for SWIGLU_OAI. A linear with a true attribute `fuses` is
    given all of it.
    """
    if getattr(linear, "fuses", False):
        return linear(x, norm=norm, gated=gated, residual=residual)
    return compose(linear, x, norm=norm, gated=gated, residual=residual)


def compose(
    linear: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    norm: Callable[[Tensor], Tensor] | None = None,
    gated: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute `project` one operation after the other."""
    y = linear(x if norm is None else norm(x))
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = _swiglu_oai(gate, up) if gated == SWIGLU_OAI else _FUNCTIONS[gated](gate) * up
    return y if residual is None else residual + y


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)
    return gate * (1.702 * gate).sigmoid() * (up.clamp(-7.0, 7.0) + 1)


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
