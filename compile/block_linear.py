"""Linears and embeddings of blocks, of .gguf files and quantized folders (cpu/block_linear.h).

Weights keep the codes, scales and minima of the file.

Legend: M rows, N outputs, K inputs. A record holds the weights of 16 outputs, in the kernel's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from ctypes import byref, c_int64, c_void_p, cast
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile.block_types import TYPES
from compile.cpp_extension import call, library
from compile.linear import NotFinite, Zeros
from compile.op_registry import define

Activations = Literal["exact", "fast"]
"""Rounding of activations: to 16 or 8 bits, per 32."""


BLOCK_TYPES = tuple(TYPES)
"""Types with a kernel, in order of its numbers: see cpu/block_types.def."""
NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""GGML types of plain numbers, in order of the kernel's numbers for them."""
WIDENED = "BF16"
"""Type of tables of bfloat16 numbers."""
LANES = 16
"""Outputs of a record."""
_FIRST_NUMBERS = 200
_PACKED_ROWS = 4096
"""Rows of numbers packed at a time, to limit the memory of intermediate values."""
_SPLIT, _UPPER = 100, 101
"""Numbers of Q8_0 in memory, and of its upper halves."""


def block_sizes(kind: str) -> tuple[int, int]:
    """Return inputs and bytes of a block, in a file."""
    return TYPES[kind].inputs, TYPES[kind].bytes


def packed_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Return the bytes of a matrix in memory, on a CPU."""
    return -(-outputs // LANES) * _record_bytes(kind, inputs)


def _record_bytes(kind: str, inputs: int) -> int:
    if kind in NUMBERS:
        return LANES * inputs * NUMBERS[kind].itemsize
    form = TYPES[kind]
    return -(-inputs // form.unit) * form.unit_bytes


class BlockPart(NamedTuple):
    """Type of a tensor, and its rows.

    uint8 [N, row bytes] of blocks, or [N, K] of one of the NUMBERS. `order`: the input of each place, int32 [K];
    numbers have none, and are put into that of the blocks next to them.
    """

    type: str
    raw: Tensor
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.raw), self.in_features

    @property
    def ndim(self) -> int:
        return 2

    @property
    def in_features(self) -> int:
        """Number of inputs.

        Raises ValueError if the type has no kernel, or the rows are not whole blocks.
        """
        if self.type in NUMBERS:
            return self.raw.shape[1]
        if self.type not in TYPES:
            raise ValueError(f"type {self.type} does not run as stored; types that do: {', '.join(BLOCK_TYPES)}")
        form, row = TYPES[self.type], self.raw.shape[-1]
        if self.raw.dtype != torch.uint8 or self.raw.dim() != 2 or row % form.bytes or not row:
            raise ValueError(
                f"{self.type} weights of {self.raw.dtype} {list(self.raw.shape)} are not rows of blocks; "
                f"give uint8 [N, a multiple of {form.bytes}]"
            )
        return row // form.bytes * form.inputs

    @classmethod
    def without_bytes(cls, kind: str, outputs: int, inputs: int) -> BlockPart:
        """Return a part on the meta device; its linear is given records."""
        if kind in NUMBERS:
            return cls(kind, torch.empty(outputs, inputs, dtype=NUMBERS[kind], device="meta"))
        form = TYPES[kind]
        return cls(kind, torch.empty(outputs, inputs // form.inputs * form.bytes, dtype=torch.uint8, device="meta"))

    def numbers(self) -> Tensor:
        """Return the weights, float32 [N, K]."""
        return self.raw.float() if self.type in NUMBERS else BlockLinear([self], None, self.in_features).unpacked()


def aligned_parts(
    parts: Sequence[BlockPart], inputs: int, *, joins: bool = False
) -> tuple[list[BlockPart], Tensor | None]:
    """Return the parts of a linear with one order of inputs, and that order.

    Neighbours of one type become one part where the first does not end with a record; always if `joins`.

    Raises ValueError if their inputs differ, or the order of the blocks'.
    """
    for part in parts:
        if part.in_features != inputs:
            raise ValueError(f"a {part.type} part has {part.in_features} inputs, the linear {inputs}")
    order = common_order([part.order for part in parts if part.type not in NUMBERS], inputs)
    aligned: list[BlockPart] = []
    for part in parts:
        raw = part.raw
        if part.type in NUMBERS and order is not None:
            raw = raw.index_select(1, order.to(raw.device, torch.int64))
        if aligned and aligned[-1].type == part.type and (joins or len(aligned[-1].raw) % LANES):
            raw = torch.cat([aligned.pop().raw, raw])
        aligned.append(BlockPart(part.type, raw, order))
    return aligned, order


def _type_number(kind: str) -> int:
    return _FIRST_NUMBERS + [*NUMBERS].index(kind) if kind in NUMBERS else BLOCK_TYPES.index(kind)


def _pack_numbers(numbers_NK: Tensor, to: Tensor) -> None:
    """Write records of numbers, [N / 16, K, 16]; NotFinite for NaN or infinite ones."""
    size, dtype = LANES * numbers_NK.shape[1], numbers_NK.dtype
    for first in range(0, len(numbers_NK), _PACKED_ROWS):
        rows_NK = numbers_NK[first : first + _PACKED_ROWS]
        if not rows_NK.isfinite().all():
            raise NotFinite("weights have NaN or infinite values")
        records = F.pad(rows_NK, (0, 0, 0, -len(rows_NK) % LANES)).unflatten(0, (-1, LANES)).transpose(1, 2)
        begin = first // LANES * size * dtype.itemsize
        to[begin : begin + records.numel() * dtype.itemsize].view(dtype).view(records.shape).copy_(records)


class Records(NamedTuple):
    """Memory of a linear, and the number of each part's type there."""

    weight: Tensor
    types: list[int]


class BlockLinear(nn.Module):
    """Linear with the blocks of one or several tensors of a file."""

    weight: Tensor  # uint8: the records of all parts
    table: Tensor  # int64 [1 + parts, 4], then the inputs' order, if any: words of `struct BlockTable`

    def __init__(
        self,
        parts: Sequence[BlockPart],
        bias_N: Tensor | None,
        in_features: int,
        *,
        activations: Activations = "exact",
        zeros: Zeros | None = None,
        records: Records | None = None,
    ) -> None:
        """Repack the parts, whose outputs follow each other. `zeros` allocates their memory.

        `records`: the result of an earlier linear with such parts, which are not read then.

        Raises ValueError if a part's type has no kernel, its rows do not have `in_features`, it does not begin at a
        multiple of 16 outputs, or blocks have different orders; NotFinite for NaN or infinite weights.
        """
        super().__init__()
        table, rows, size = [], 0, 0
        parts, order = aligned_parts(parts, in_features)
        for part in parts:
            if rows % LANES:
                raise ValueError(f"a {part.type} part begins at output {rows}, which is not a multiple of {LANES}")
            num, record = -(-len(part.raw) // LANES), _record_bytes(part.type, in_features)
            table.append([_type_number(part.type), num, size, record])
            rows, size = rows + len(part.raw), size + num * record
        if not rows:
            raise ValueError("a linear without outputs")
        self.in_features, self.out_features, self.activations = in_features, rows, activations
        head = [len(table), int(activations == "exact"), 0, int(order is not None)]
        self.register_buffer("table", torch.cat([torch.tensor([head, *table]), order_words(order)]), persistent=False)
        self.register_buffer("bias", bias_N, persistent=False)
        if records is not None:
            assert records.weight.shape == (size,), f"{list(records.weight.shape)} bytes of records for {size}"
            self._part_words[:, 0] = torch.tensor(records.types)
            self.register_buffer("weight", records.weight, persistent=False)
            return
        weight = torch.empty(size, dtype=torch.uint8) if zeros is None else zeros((size,), torch.uint8)
        self.register_buffer("weight", weight, persistent=False)
        for part, (_, _, offset, _), words in zip(parts, table, self._part_words, strict=True):
            raw = part.raw if part.raw.stride(1) == 1 else part.raw.contiguous()
            if part.type in NUMBERS:
                _pack_numbers(raw, self.weight[offset:])
                continue
            sizes, to, finite = (raw.stride(0), len(raw), in_features), self.weight.data_ptr() + offset, c_int64()
            call("repack_blocks", torch.uint8, raw, *sizes, words, to, byref(finite), torch.get_num_threads())
            if not finite.value:
                raise NotFinite("weights have NaN or infinite values")

    def table_address(self) -> int:
        """Return the table's address, for kernels of this process."""
        address = self.table.data_ptr()
        c_int64.from_address(address + 2 * self.table.itemsize).value = _block_kernel()
        return address

    @property
    def _part_words(self) -> Tensor:
        return self.table[1 : 1 + int(self.table[0, 0])]

    @property
    def types(self) -> list[int]:
        """Numbers of the parts' types in memory."""
        return self._part_words[:, 0].tolist()

    @property
    def has_halves(self) -> bool:
        """True if some weights are Q8_0, whose codes are stored as halves."""
        return _SPLIT in self.types

    def upper_halves(self) -> BlockLinear:
        """Return a linear that reads the upper halves of Q8_0 alone.

        Both share their memory. Activations are rounded to 8 bits; weights of other types are whole.
        """
        upper = copy(self)
        upper._buffers = {**self._buffers, "table": self.table.clone()}
        upper.table[0, 1] = 0
        upper._part_words[:, 0][self._part_words[:, 0] == _SPLIT] = _UPPER
        upper.activations = "fast"
        return upper

    @property
    def dtype(self) -> torch.dtype:
        """Type of the unpacked weights."""
        return torch.float32

    def unpacked(self) -> Tensor:
        """Return the weights, float32 [N, K]."""
        return self.dequantize(slice(None))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and minima."""
        return self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self.in_features, f"{x.shape[-1]} inputs for a linear of {self.in_features}"
        function: Any = torch.ops.sharesd.block_linear if torch.compiler.is_compiling() else _block_linear_cpu
        return function(x, self.weight, self.table, self.bias, self.out_features)

    def dequantize(self, rows: Tensor | slice) -> Tensor:
        """Return the weights of some outputs, float32 [n, K]."""
        if isinstance(rows, slice):
            rows = torch.arange(self.out_features)[rows]
        return self._decode(rows, torch.float32)

    def _decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        function: Any = torch.ops.sharesd.decode_rows if torch.compiler.is_compiling() else _decode_rows_cpu
        return function(rows, self.weight, self.table, self.out_features, self.in_features, dtype)


class BlockEmbedding(nn.Module):
    """Embedding of blocks, decoded at each lookup."""

    def __init__(self, linear: Any, dtype: torch.dtype, *, is_head: bool) -> None:
        """Look up rows of a linear of blocks, perhaps the head."""
        super().__init__()
        self._linear = (linear,)
        if not is_head:  # else it is counted, and quantized, with the head
            self.own = linear
        self.dtype = dtype
        self.num_embeddings, self.embedding_dim = linear.out_features, linear.in_features

    @cached_property
    def weight(self) -> Tensor:
        """The whole table [V, D], for heads that read its memory."""
        return self(torch.arange(self.num_embeddings, device=self.linear.weight.device))

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear._decode(ids, self.dtype)

    @property
    def linear(self) -> Any:
        """Linear that holds the rows."""
        return self._linear[0]


@cache
def _block_kernel() -> int:
    """Return the address of the kernel of all types."""
    address = cast(library("block_ops").block_sums_uint8, c_void_p).value
    assert address is not None
    return address


def _block_linear_cpu(x: Tensor, weight: Tensor, table: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    assert bias is None or bias.dtype == x.dtype, f"bias of {bias.dtype}, called with {x.dtype}"
    x = x.contiguous()
    K = x.shape[-1]
    y = x.new_empty((*x.shape[:-1], out_features))
    sizes = x.numel() // K, out_features, K
    call("block_linear", x.dtype, x, weight, bias, y, *sizes, table, _block_kernel(), torch.get_num_threads())
    return y


def _decode_rows_cpu(
    rows: Tensor, weight: Tensor, table: Tensor, out_features: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    rows = rows.to(torch.int64).contiguous()
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= out_features):
        raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} of {out_features}")
    y = torch.empty((*rows.shape, in_features), dtype=dtype)
    call("decode_rows", dtype, rows, rows.numel(), weight, table, in_features, y, torch.get_num_threads())
    return y


define(
    "block_linear(Tensor x, Tensor weight, Tensor table, Tensor? bias, int out_features) -> Tensor",
    cpu=_block_linear_cpu,
    meta=lambda x, weight, table, bias, out_features: x.new_empty((*x.shape[:-1], out_features)),
)
define(
    "decode_rows(Tensor rows, Tensor weight, Tensor table, int out_features, int in_features, ScalarType dtype)"
    " -> Tensor",
    cpu=_decode_rows_cpu,
    meta=lambda rows, weight, table, out, inputs, dtype: rows.new_empty((*rows.shape, inputs), dtype=dtype),
)


def common_order(orders: Sequence[Tensor | None], num_inputs: int) -> Tensor | None:
    """Return the order of all parts; None: as the inputs come.

    Raises ValueError if parts differ, or the order is not a permutation of the inputs.
    """
    if not all(same_order(order, orders[0]) for order in orders):
        raise ValueError("parts of a linear have their inputs in different orders; use --dequantize")
    order = orders[0] if orders else None
    if order is None:
        return None
    inputs = torch.arange(num_inputs, dtype=torch.int32, device=order.device)
    if order.dtype != torch.int32 or not torch.equal(order.sort().values, inputs):
        raise ValueError(f"an order of {order.dtype} {list(order.shape)} is not int32 [{num_inputs}]")
    return order


def same_order(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if two orders are equal."""
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def order_words(order: Tensor | None) -> Tensor:
    """Return an order as rows of words, int64 [K / 8, 4]."""
    return torch.empty(0, 4, dtype=torch.int64) if order is None else order.view(torch.int64).view(-1, 4)
