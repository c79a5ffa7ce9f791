"""The precision switch: one linear layer with two sets of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Switch:
    """Which weights the linears of a model use. Shared by all of them; the full ones unless told otherwise."""

    __slots__ = ("low",)

    def __init__(self) -> None:
        self.low = False

    @contextmanager
    def use_low(self) -> Iterator[None]:
        """Within the block, forward passes run through the quantized weights."""
        self.low = True
        try:
            yield
        finally:
            self.low = False


class SwitchLinear(nn.Module):
    """A linear that is `full` for the target and `low` for the drafter."""

    def __init__(self, full: nn.Module, low: nn.Module, switch: Switch) -> None:
        super().__init__()
        self.full, self.low, self.switch = full, low, switch

    @property
    def fuses(self) -> bool:
        """Whether the linear in use takes what stands before and behind it (see `forward`'s `around`)."""
        return getattr(self.low if self.switch.low else self.full, "fuses", False)

    def forward(self, x: Tensor, **around: Any) -> Tensor:
        return self.low(x, **around) if self.switch.low else self.full(x, **around)


class LowLinear(nn.Module):
    """A linear with quantized weights: x [..., K] -> [..., N], in the dtype it was built for.

    Subclasses own their weights as buffers. Casting them with `.to(dtype)` is not supported: quantize anew.
    """

    bias: Tensor | None

    def __init__(self, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def nbytes(self) -> int:
        """Bytes that the quantized weights add. The bias is not counted: its memory is the full linear's."""
        return sum(buffer.nbytes for name, buffer in self.named_buffers() if name != "bias")
