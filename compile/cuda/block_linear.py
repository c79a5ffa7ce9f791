"""Batch invariant linears of GGUF blocks on CUDA.

Codes, scales and minima are those of the file; values are rounded for prompts alone, to the dtype of the activations.
Parts of plain numbers next to blocks have that dtype, and a launch of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from compile.block_linear import NUMBERS, BlockPart, aligned_parts
from compile.cuda.block_form import FORMS, BlockForm, pack
from compile.cuda.gemm_config import block_tile, tile_of
from compile.cuda.linear import RowLinearBase
from compile.cuda.pdl import with_room
from compile.fused_linear import compose
from compile.linear import NotFinite
from compile.op_registry import define_for_triton


class BlockRowLinear(RowLinearBase):
    """Linear with the blocks of one or several tensors of a file."""

    order: Tensor | None
    scale = None
    takes_norm = False

    def __init__(
        self,
        parts: Sequence[BlockPart],
        bias_N: Tensor | None,
        device: torch.device,
        max_rows: int,
        batch: int = 1,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Pack the parts, whose outputs follow each other, on a device.

        `dtype`: of parts that are numbers. Raises ValueError if a part's type has no kernel, or parts have different
        inputs or orders of them; NotFinite for numbers that are not.
        """
        inputs = parts[0].in_features
        parts = [_in_dtype(part, dtype) for part in parts]
        parts, order = aligned_parts(parts, inputs, joins=True)
        super().__init__(sum(len(part.raw) for part in parts), inputs, device, max_rows, batch)
        self.register_buffer("order", None if order is None else order.to(device, torch.int64), persistent=False)
        self.types, self.outputs = [part.type for part in parts], [len(part.raw) for part in parts]
        size = sum(prod(_size(part.type, len(part.raw), inputs)) for part in parts)
        self.register_buffer("weight", torch.empty(size, dtype=torch.int32, device=device), persistent=False)
        self.register_buffer("bias", bias_N, persistent=False)
        for part, (weight, form) in zip(parts, _parts(self.weight, self.types, self.outputs, inputs), strict=True):
            if form is None:
                weight.copy_(part.raw)
            else:
                pack(part, weight)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the unpacked weights."""
        return torch.float32

    def unpacked(self) -> Tensor:
        """Return the weights, float32 [N, K]."""
        return self._decode(None, torch.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and minima."""
        return self.weight.nbytes

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [N, K], inputs in the order of storage."""
        return self._stored_rows(None, dtype)

    def _stored_rows(self, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
        layout = self.types, self.outputs, self.in_features
        return torch.ops.sharesd.decode_block_rows(self.weight, rows, *layout, dtype)

    def _decode(self, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
        stored = self._stored_rows(rows, dtype)
        return stored if self.order is None else torch.empty_like(stored).index_copy_(-1, self.order, stored)

    def _gathered(self, x: Tensor) -> Tensor:
        """Return activations in the order of storage."""
        return x if self.order is None else x.index_select(-1, self.order)

    def many_rows(self, x: Tensor) -> Tensor:
        return super().many_rows(self._gathered(x))

    def forward(self, x: Tensor, *, norm: Any = None, gated: str = "", residual: Tensor | None = None) -> Tensor:
        if gated and len(self.types) > 1:  # two launches, none of which has both
            return compose(super().forward, x, norm=norm, gated=gated, residual=residual)
        return super().forward(x, norm=norm, gated=gated, residual=residual)

    def product(self, x: Tensor, norm: Tensor | None, eps: float, residual: Tensor | None, gated: str) -> Tensor:
        assert norm is None, "norms have a launch of their own"
        weights = self.types, self.outputs, self.counters
        return torch.ops.sharesd.block_row_linear(self._gathered(x), self.weight, self.bias, residual, gated, *weights)

    def dequantize(self, rows: Tensor) -> Tensor:
        """Return the weights of some outputs, float32 [..., K]."""
        return self._decode(rows, torch.float32)


def _in_dtype(part: BlockPart, dtype: torch.dtype) -> BlockPart:
    """Return a part, its numbers in a dtype."""
    if part.type not in NUMBERS:
        return part
    raw = part.raw.to(dtype)
    if not raw.isfinite().all():
        raise NotFinite("weights have NaN or infinite values")
    return BlockPart(next(kind for kind, own in NUMBERS.items() if own == dtype), raw)


def _size(kind: str, outputs: int, inputs: int) -> tuple[int, ...]:
    """Return the size of a part in words of 32 bits."""
    if kind in NUMBERS:
        return outputs, inputs * NUMBERS[kind].itemsize // 4
    return FORMS[kind].records(outputs, inputs)


def _parts(
    weight: Tensor, types: Sequence[str], outputs: Sequence[int], inputs: int
) -> list[tuple[Tensor, BlockForm | None]]:
    """Return the records of each part, and their layout; numbers [N, K] have none."""
    sizes = [_size(kind, rows, inputs) for kind, rows in zip(types, outputs, strict=True)]
    pieces = [piece.view(size) for piece, size in zip(weight.split([prod(size) for size in sizes]), sizes, strict=True)]
    return [
        (piece.view(NUMBERS[kind]), None) if kind in NUMBERS else (piece, FORMS[kind])
        for piece, kind in zip(pieces, types, strict=True)
    ]


def _block_row_linear(x, weight, bias, residual, gated, types, outputs, counters):
    from compile.cuda.block_gemm import multiply_blocks  # imports Triton, which not every machine has

    K, first = x.shape[-1], 0
    x_MK = x.reshape(-1, K).contiguous()
    y_MN = x_MK.new_empty(len(x_MK), sum(outputs) // (2 if gated else 1))
    residual = None if residual is None else residual.reshape(y_MN.shape).contiguous()
    around = {"bias": bias, "residual": residual, "gated": gated, "counters": counters}
    for kind, rows, (words_RUW, form) in zip(types, outputs, _parts(weight, types, outputs, K), strict=True):
        num = rows // 2 if gated else rows
        if form is None:
            _multiply_numbers(x_MK, words_RUW, y_MN[:, first : first + num], first, **around)
            first += num
            continue
        _, units, words = words_RUW.shape
        tile = block_tile(x.device.index if x.is_cuda else None, rows, units, form.unit, 4 * words)
        product = partial(multiply_blocks, x_MK, words_RUW, form, y_MN, first, num, **around)
        with_room(partial(_in_stages, product, tile), tile.stages, (x.device, kind, tile))
        first += num
    return y_MN.view(*x.shape[:-1], -1)


def _multiply_numbers(x_MK, weight_NK, to_MN, first, bias, residual, gated, counters):
    from compile.cuda.gemm import multiply

    last = first + to_MN.shape[1]
    around = {
        "bias": None if bias is None else bias[first : first + len(weight_NK)],
        "residual": None if residual is None else residual[:, first:last].contiguous(),
        "gated": gated,
        "counters": counters,
    }
    bits = 32 if weight_NK.dtype == torch.float32 else 16
    tile = tile_of(x_MK.device.index if x_MK.is_cuda else None, *weight_NK.shape, bits, 0)

    def product(stages):
        to_MN.copy_(multiply(x_MK, weight_NK, replace(tile, stages=stages), **around))

    with_room(product, tile.stages, (x_MK.device, weight_NK.dtype, tile))


def _in_stages(product, tile, stages):
    product(replace(tile, stages=stages))


def _decode_block_rows(weight, rows, types, outputs, inputs, dtype):
    from compile.cuda.block_gemm import decode_rows

    parts, num = _parts(weight, types, outputs, inputs), sum(outputs) if rows is None else rows.numel()
    y_RK, first = torch.empty(num, inputs, dtype=dtype, device=weight.device), 0
    if rows is not None:
        [(words_RUW, form)] = parts  # tables are of one type
        assert form is not None
        decode_rows(rows.reshape(-1).to(torch.int64).contiguous(), words_RUW, form, y_RK)
        return y_RK.view(*rows.shape, inputs)
    for (words_RUW, form), size in zip(parts, outputs, strict=True):
        to_RK = y_RK[first : first + size]
        if form is None:
            to_RK.copy_(words_RUW)
        else:
            decode_rows(None, words_RUW, form, to_RK)
        first += size
    return y_RK


def _block_row_linear_meta(x, weight, bias, residual, gated, types, outputs, counters):
    return x.new_empty((*x.shape[:-1], sum(outputs) // (2 if gated else 1)))


def _decode_block_rows_meta(weight, rows, types, outputs, inputs, dtype):
    return weight.new_empty((*([sum(outputs)] if rows is None else rows.shape), inputs), dtype=dtype)


# `counters` are zero again when the kernel has ended: no visible tensor is mutated.
define_for_triton(
    "block_row_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str gated, str[] types, int[] outputs, "
    "Tensor counters) -> Tensor",
    _block_row_linear,
    _block_row_linear_meta,
)
define_for_triton(
    "decode_block_rows(Tensor weight, Tensor? rows, str[] types, int[] outputs, int inputs, ScalarType dtype) "
    "-> Tensor",
    _decode_block_rows,
    _decode_block_rows_meta,
)
