"""Linear with norm, gate and residual, in one launch if supported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from compile.activations import ACTIVATIONS, SWIGLU_OAI

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
