"""Batch invariant linears for few rows on CUDA.

A preceding norm, a gate of the outputs and a residual are part of the launch. The product takes x * norm weight and
divides its sums by the root mean square, one rounding fewer than either kind of RMSNorm has. In float16, whose range x
* weight may exceed, norms run before it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile.cuda.gemm_config import ROWS, tile_of
from compile.cuda.pdl import with_room
from compile.fused_linear import compose
from compile.op_registry import define_for_triton

INPUT_MULTIPLE = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BITS = {torch.int16: 4, torch.int8: 8, torch.float32: 32}


class StepLinear(nn.Module):
    """Base of linears that have a kernel for up to `max_rows` rows of a sequence.

    They map [..., T, K] to [..., T, N].
    """

    weight: Tensor
    bias: Tensor | None
    fuses = True
    takes_norm = True
    """True if norms are part of the launch."""

    def __init__(self, outputs: int, inputs: int, max_rows: int) -> None:
        super().__init__()
        self.out_features, self.in_features, self.max_rows, self.group_size = outputs, inputs, max_rows, 0

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] in a dtype."""
        raise NotImplementedError

    def forward(self, x: Tensor, *, norm: Any = None, gated: str = "", residual: Tensor | None = None) -> Tensor:
        """See `compile.fused_linear.project`; `norm` has `weight` and `eps`."""
        if x.shape[-2] > self.max_rows:
            return compose(self.many_rows, x, norm=norm, gated=gated, residual=residual)
        if norm is not None and (x.dtype == torch.float16 or not self.takes_norm):
            x, norm = torch.ops.sharesd.row_norm(x, norm.weight, norm.eps), None
        around = None if norm is None else norm.weight, 0.0 if norm is None else norm.eps, residual, gated
        return self.product(x, *around)

    def many_rows(self, x: Tensor) -> Tensor:
        """Return the outputs of more rows."""
        return F.linear(x, self.full_weight(x.dtype), self.bias)

    def product(self, x: Tensor, norm: Tensor | None, eps: float, residual: Tensor | None, gated: str) -> Tensor:
        """Return the outputs of few rows, in one launch."""
        raise NotImplementedError


class RowLinearBase(StepLinear):
    """Base of linears by `gemm.row_gemm`, which reads their `weight`."""

    scale: Tensor | None
    counters: Tensor  # int32: programs that have arrived if K is split; zero between calls

    def __init__(self, outputs: int, inputs: int, device: torch.device, max_rows: int, batch: int) -> None:
        """`batch` sequences have up to `max_rows` rows each."""
        super().__init__(outputs, inputs, max_rows)
        tiles = -(-max_rows * batch // ROWS) * -(-outputs // ROWS)  # at most: no tile has fewer outputs
        self.register_buffer("counters", torch.zeros(tiles, dtype=torch.int32, device=device), persistent=False)

    def product(self, x: Tensor, norm: Tensor | None, eps: float, residual: Tensor | None, gated: str) -> Tensor:
        weights = self.scale, self.group_size, self.counters
        return torch.ops.sharesd.row_linear(x, self.weight, self.bias, norm, eps, residual, gated, *weights)


class RowLinear(RowLinearBase):
    """nn.Linear, batch invariant; shares its weights."""

    def __init__(self, linear: nn.Linear, max_rows: int, batch: int = 1) -> None:
        super().__init__(linear.out_features, linear.in_features, linear.weight.device, max_rows, batch)
        self.weight, self.bias, self.scale = linear.weight, linear.bias, None

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        return self.weight


def replace_with_row_linears(model: nn.Module, max_rows: int, batch: int = 1) -> int:
    """Replace every supported nn.Linear in place, sharing its weights; returns their number."""
    count = 0
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and supports_linear(child.in_features, child.weight.dtype):
                setattr(parent, name, RowLinear(child, max_rows, batch))
                count += 1
    return count


def supports_linear(inputs: int, dtype: torch.dtype) -> bool:
    """Return True if the kernel supports such weights."""
    return inputs % INPUT_MULTIPLE == 0 and dtype in DTYPES


def _row_linear(x, weight, bias, norm, eps, residual, gated, scale, group, counters):
    from compile.cuda.gemm import multiply  # imports Triton, which not every machine has

    K = x.shape[-1]
    bits = _BITS.get(weight.dtype, 16)
    tile = tile_of(x.device.index if x.is_cuda else None, weight.shape[0], K, bits, group)
    product = partial(
        multiply,
        x.reshape(-1, K).contiguous(),
        weight,
        bias=bias,
        norm=norm,
        eps=eps,
        residual=None if residual is None else residual.contiguous(),
        gated=gated,
        scale=scale,
        group=group,
        counters=counters,
    )
    y_MN = with_room(lambda stages: product(tile=replace(tile, stages=stages)), tile.stages, (x.device, tile))
    return y_MN.view(*x.shape[:-1], -1)


def _row_linear_meta(x, weight, bias, norm, eps, residual, gated, scale, group, counters):
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if gated else 1)))


def _row_norm(x, weight, eps):
    from compile.cuda.row_norm import normalise

    return normalise(x.contiguous(), weight, eps)


def _row_norm_meta(x, weight, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# `counters` are zero again when the kernel has ended: no visible tensor is mutated.
define_for_triton(
    "row_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, float eps, Tensor? residual, str gated, "
    "Tensor? scale, int group, Tensor counters) -> Tensor",
    _row_linear,
    _row_linear_meta,
)
define_for_triton("row_norm(Tensor x, Tensor weight, float eps) -> Tensor", _row_norm, _row_norm_meta)
