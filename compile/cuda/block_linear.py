"""Batch invariant linears of GGUF blocks on CUDA.

Codes, scales and minima are those of the file; values are rounded for prompts alone, to the dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from compile.block_linear import BlockPart
from compile.cuda.block_form import FORMS, BlockForm, pack
from compile.cuda.gemm_config import block_tile
from compile.cuda.linear import RowLinearBase
from compile.cuda.pdl import with_room
from compile.fused_linear import compose
from compile.input_order import common_order
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
    ) -> None:
        """Pack the parts, whose outputs follow each other, on a device.

        Raises ValueError if a part's type has no kernel, or parts have different inputs or orders of them.
        """
        inputs = parts[0].in_features
        for part in parts:
            if part.in_features != inputs:
                raise ValueError(f"a {part.type} part has {part.in_features} inputs, the linear {inputs}")
        order = common_order([part.order for part in parts], inputs)
        super().__init__(sum(len(part.raw) for part in parts), inputs, device, max_rows, batch)
        self.register_buffer("order", None if order is None else order.to(device, torch.int64), persistent=False)
        parts = _merged(parts)
        self.types, self.outputs = [part.type for part in parts], [len(part.raw) for part in parts]
        size = sum(prod(FORMS[part.type].records(len(part.raw), inputs)) for part in parts)
        self.register_buffer("weight", torch.empty(size, dtype=torch.int32, device=device), persistent=False)
        self.register_buffer("bias", bias_N, persistent=False)
        for part, (records, _) in zip(parts, _parts(self.weight, self.types, self.outputs, inputs), strict=True):
            pack(part, records)

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


def _merged(parts: Sequence[BlockPart]) -> list[BlockPart]:
    """Return the parts, neighbours of one type as one."""
    merged = list(parts[:1])
    for part in parts[1:]:
        if part.type == merged[-1].type:
            merged[-1] = BlockPart(part.type, torch.cat([merged[-1].raw, part.raw]))
        else:
            merged.append(part)
    return merged


def _parts(weight: Tensor, types: Sequence[str], outputs: Sequence[int], inputs: int) -> list[tuple[Tensor, BlockForm]]:
    """Return the records of each part, and their layout."""
    forms = [FORMS[kind] for kind in types]
    sizes = [form.records(rows, inputs) for form, rows in zip(forms, outputs, strict=True)]
    pieces = weight.split([prod(size) for size in sizes])
    return [(piece.view(size), form) for piece, size, form in zip(pieces, sizes, forms, strict=True)]


def _block_row_linear(x, weight, bias, residual, gated, types, outputs, counters):
    from compile.cuda.block_gemm import multiply_blocks  # imports Triton, which not every machine has

    K, first = x.shape[-1], 0
    x_MK = x.reshape(-1, K).contiguous()
    y_MN = x_MK.new_empty(len(x_MK), sum(outputs) // (2 if gated else 1))
    residual = None if residual is None else residual.reshape(y_MN.shape).contiguous()
    around = {"bias": bias, "residual": residual, "gated": gated, "counters": counters}
    for kind, rows, (words_RUW, form) in zip(types, outputs, _parts(weight, types, outputs, K), strict=True):
        num = rows // 2 if gated else rows
        _, units, words = words_RUW.shape
        tile = block_tile(x.device.index if x.is_cuda else None, rows, units, form.unit, 4 * words)
        product = partial(multiply_blocks, x_MK, words_RUW, form, y_MN, first, num, **around)
        with_room(partial(_in_stages, product, tile), tile.stages, (x.device, kind, tile))
        first += num
    return y_MN.view(*x.shape[:-1], -1)


def _in_stages(product, tile, stages):
    product(replace(tile, stages=stages))


def _decode_block_rows(weight, rows, types, outputs, inputs, dtype):
    from compile.cuda.block_gemm import decode_rows

    parts, num = _parts(weight, types, outputs, inputs), sum(outputs) if rows is None else rows.numel()
    y_RK, first = torch.empty(num, inputs, dtype=dtype, device=weight.device), 0
    if rows is not None:
        [(words_RUW, form)] = parts
        decode_rows(rows.reshape(-1).to(torch.int64).contiguous(), words_RUW, form, y_RK)
        return y_RK.view(*rows.shape, inputs)
    for (words_RUW, form), size in zip(parts, outputs, strict=True):
        decode_rows(None, words_RUW, form, y_RK[first : first + size])
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
