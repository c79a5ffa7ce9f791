"""A linear with what stands before and behind it: one launch where the linear offers that, else one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Names as checkpoints have them."""


def project(
    linear: Callable[..., Tensor],
    x: Tensor,
    *,
    norm: Callable[[Tensor], Tensor] | None = None,
    gated: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """residual + linear(norm(x)). With `gated`, an activation's name, of the linear's outputs act(first half) * second.

    A linear with a true attribute `fuses` is given all of it.
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
    """What `project` computes, one operation after the other."""
    y = linear(x if norm is None else norm(x))
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = ACTIVATIONS[gated](gate) * up
    return y if residual is None else residual + y
