"""Layers that all models share: linears, RMSNorm and the MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compile.fused_linear import project
from multigpu.tensor_parallel import UNSHARDED, Shard
from sharesd.models.decoder_config import DecoderConfig


def empty_linear(inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device | str) -> nn.Linear:
    """Return a linear with uninitialised weights.

    torch's skip_init would import sympy and Dynamo for a second.
    """
    linear = nn.Linear.__new__(nn.Linear)  # its __init__ draws values, which would take most of a mixture's start
    nn.Module.__init__(linear)
    linear.in_features, linear.out_features = inputs, outputs
    linear.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
    added = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None
    linear.register_parameter("bias", added)
    return linear


class RMSNorm(nn.Module):
    """RMSNorm: x / rms(x) * weight (Zhang & Sennrich 2019).

    Computed in float32 at least. With `gemma`, the weight is kept in float32 (one added at load) and multiplies before
    the cast.
    """

    def __init__(self, size: int, eps: float, gemma: bool, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.weight = nn.Parameter(torch.empty(size, dtype=wide if gemma else dtype, device=device))
        self.eps, self.gemma = eps, gemma

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype) if self.gemma else self.weight * wide.to(x.dtype)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(
        self, config: DecoderConfig, part: Shard = UNSHARDED, *, intermediate_size: int = 0, **place: Any
    ) -> None:
        """`intermediate_size`: instead of the config's."""
        super().__init__()
        size = intermediate_size or config.intermediate_size
        self.gate_up = empty_linear(config.hidden_size, 2 * part.of(size), bias=config.mlp_bias, **place)
        self.down = empty_linear(*part.of_second(size, config.hidden_size), bias=config.mlp_bias, **place)
        self.hidden_act = config.hidden_act

    def forward(self, x: Tensor, norm: nn.Module | None = None, residual: Tensor | None = None) -> Tensor:
        """Return residual + MLP of norm(x)."""
        return project(self.down, project(self.gate_up, x, norm=norm, gated=self.hidden_act), residual=residual)
