"""Precision switch: linears with two sets of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Switch:
    """Selection of full or quantized weights, shared by a model's linears."""

    __slots__ = ("quantized",)

    def __init__(self) -> None:
        self.quantized = False

    @contextmanager
    def quantized_weights(self) -> Iterator[None]:
        """Select the quantized weights inside the context."""
        self.quantized = True
        try:
            yield
        finally:
            self.quantized = False


class SwitchLinear(nn.Module):
    """Linear with full weights for the target, quantized ones for the drafter."""

    def __init__(self, full: nn.Module, quantized: nn.Module, switch: Switch) -> None:
        super().__init__()
        self.full, self.quantized, self.switch = full, quantized, switch

    @property
    def fuses(self) -> bool:
        """True if the linear in use fuses its neighbours (see `forward`'s `around`)."""
        return getattr(self.quantized if self.switch.quantized else self.full, "fuses", False)

    def forward(self, x: Tensor, **around: Any) -> Tensor:
        return self.quantized(x, **around) if self.switch.quantized else self.full(x, **around)


class QuantizedLinear(nn.Module):
    """Linear with quantized weights: x [..., K] -> [..., N].

    Input and output have one dtype. Subclasses register their weights as buffers. Casting with `.to(dtype)` is not
    supported.
    """

    bias: Tensor | None

    def __init__(self, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def nbytes(self) -> int:
        """Bytes of the quantized weights, without the bias."""
        return sum(buffer.nbytes for name, buffer in self.named_buffers() if name != "bias")
