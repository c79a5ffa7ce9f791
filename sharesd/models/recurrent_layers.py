"""Layers that stand in place of attention: short convolutions and gated delta rules.

Legend: B rows of the batch, T new tokens, D hidden size, R slots of a ring, L inputs of a convolution, I inputs of a
delta rule, N value heads, v size of one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compile.attention import TreeAttentionMask
from compile.delta_rule import DeltaState, normed_delta
from compile.fused_linear import project
from compile.short_conv import gated_short_conv
from sharesd.kvcache.recurrent import RecurrentSizes
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.layers import RMSNorm, empty_linear


def recurrent_sizes(config: DecoderConfig) -> RecurrentSizes | None:
    """Return what layers without attention keep of a text; None: all have attention."""
    width = max(config.conv_widths)
    if not width:
        return None
    return RecurrentSizes(width, config.hidden_size if config.delta is None else config.delta.inputs, config.delta)


class ConvKernel(nn.Module):
    """Weights [D, L] of a depthwise convolution over L inputs, the newest last, and perhaps a bias [D]."""

    bias: Tensor | None

    def __init__(
        self, channels: int, width: int, *, bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width, dtype=dtype, device=device))
        added = nn.Parameter(torch.empty(channels, dtype=dtype, device=device)) if bias else None
        self.register_parameter("bias", added)


class ShortConv(nn.Module):
    """out_proj(c * conv(b * x)) with b, c, x = in_proj(x), over the last inputs b * x (LFM2, Liquid AI 2025)."""

    def __init__(self, config: DecoderConfig, width: int, **place: Any) -> None:
        super().__init__()
        D, bias = config.hidden_size, config.conv_bias
        self.in_proj = empty_linear(D, 3 * D, bias=bias, **place)
        self.kernel = ConvKernel(D, width, bias=bias, **place)
        self.out_proj = empty_linear(D, D, bias=bias, **place)

    def forward(
        self,
        x_BTD: Tensor,
        ring_BRD: Tensor,
        ends_B: Tensor,
        lengths_B: Tensor,
        *tree_mask: Tensor,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return residual + convolution over norm(x); writes the inputs of these tokens to the ring.

        Those at `ends` and after are padding, and are not written.
        """
        mask = TreeAttentionMask(*tree_mask) if tree_mask else None
        kernel = self.kernel.weight, self.kernel.bias
        y_BTD = gated_short_conv(project(self.in_proj, x_BTD, norm=norm), ring_BRD, lengths_B, ends_B, *kernel, mask)
        return project(self.out_proj, y_BTD, residual=residual)


class DeltaRates(nn.Module):
    """Weights [value heads] that decays of a gated delta rule are made of, in float32 at least."""

    def __init__(self, num_heads: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.A_log = nn.Parameter(torch.empty(num_heads, dtype=wide, device=device))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, dtype=wide, device=device))

    def decay(self) -> Tensor:
        """Return what softplus(step + dt_bias) is multiplied by: the logarithm of the decay."""
        return -self.A_log.exp()


class GatedDeltaNet(nn.Module):
    """out_proj(norm(delta rule over convolved q, k, v) * silu(z)) (Yang et al. 2024; Qwen3-Next, Qwen3.5).

    `in_proj` gives q, k, v, then gates z, rates b and steps a.
    """

    def __init__(self, config: DecoderConfig, width: int, **place: Any) -> None:
        super().__init__()
        assert config.delta is not None
        self.sizes = sizes = config.delta
        self.in_proj = empty_linear(config.hidden_size, sizes.inputs + sizes.outputs, bias=False, **place)
        self.kernel = ConvKernel(sizes.channels, width, bias=False, **place)
        self.rates = DeltaRates(sizes.value_heads, **place)
        self.norm = RMSNorm(sizes.value_size, config.rms_norm_eps, False, **place)
        self.out_proj = empty_linear(sizes.outputs, config.hidden_size, bias=False, **place)

    def forward(
        self,
        x_BTD: Tensor,
        ring_BRI: Tensor,
        state: DeltaState,
        lengths_B: Tensor,
        *tree_mask: Tensor,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return residual + delta rule over norm(x); writes the inputs of these tokens to the ring."""
        y_BTW = normed_delta(
            project(self.in_proj, x_BTD, norm=norm),
            ring_BRI,
            state,
            lengths_B,
            self.kernel.weight,
            self.rates.A_log,
            self.rates.dt_bias,
            self.norm,
            self.sizes,
            TreeAttentionMask(*tree_mask) if tree_mask else None,
        )
        return project(self.out_proj, y_BTW, residual=residual)
