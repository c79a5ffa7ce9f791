"""Linears for few rows on the CPU: packed once, batch invariant.

They run at the speed of memory. Legend: M rows, N outputs, K inputs, L lanes of a vector, P inputs multiplied together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref, c_int64

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile.cpp_extension import call
from compile.op_registry import define, runs_cpp

QUANTIZED_INPUT_MULTIPLE = 32
"""Divisor of the number of inputs of a low-bit linear."""
_PACKED_ROWS = 4096
"""Rows packed at a time, to limit the memory of intermediate values."""
LAYOUT = {torch.bfloat16: (16, 2), torch.float16: (16, 1), torch.float32: (16, 1), torch.float64: (8, 1)}
"""L and P of each dtype."""


def packed_size(N: int, K: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return the size [N / L, K / P, L, P]."""
    lanes, pair = LAYOUT[dtype]
    return -(-N // lanes), -(-K // pair), lanes, pair


Zeros = Callable[[Sequence[int], torch.dtype], Tensor]
"""Allocator of zeros (size, dtype)."""


class NotFinite(ValueError):
    """Weights with NaN or infinite values."""


def pack_rows(weight_NK: Tensor, to: Tensor) -> None:
    """Pack weights, of its own dtype, into `to`, padded with zeros.

    Raises NotFinite, after all are packed.
    """
    assert weight_NK.dtype == to.dtype
    _pack("pack_rows", to.dtype, weight_NK, to)


def _pack(name: str, dtype: torch.dtype, weight_NK: Tensor, to: Tensor) -> None:
    weight_NK = weight_NK if weight_NK.stride(1) == 1 else weight_NK.contiguous()
    finite = c_int64()
    sizes = *weight_NK.shape, byref(finite), torch.get_num_threads()
    call(name, dtype, weight_NK, weight_NK.stride(0), to, *sizes)
    if not finite.value:
        raise NotFinite("weights have NaN or infinite values")


class PackedLinear(nn.Module):
    """nn.Linear on the CPU with packed weights."""

    weight: Tensor  # [N / L, K / P, L, P]
    bias: Tensor | None
    is_settled = False
    """True if the weights are in their final memory."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_NK.shape
        weight = weight_NK.new_empty(packed_size(self.out_features, self.in_features, weight_NK.dtype))
        if not weight.is_meta:
            with suppress(NotFinite):
                pack_rows(weight_NK, weight)
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias_N, persistent=False)

    @classmethod
    def from_parts(
        cls, parts: Sequence[Tensor], bias_N: Tensor | None, dtype: torch.dtype, zeros: Zeros
    ) -> PackedLinear:
        """Pack rows in several parts into their final memory.

        `zeros` allocates it. Raises NotFinite.
        """
        lanes = LAYOUT[dtype][0]
        if any(len(part) % lanes for part in parts[:-1]):
            parts = [torch.cat(list(parts))]
        num_outputs, num_inputs = sum(map(len, parts)), parts[0].shape[1]
        linear = cls(torch.empty(num_outputs, num_inputs, dtype=dtype, device="meta"), bias_N)
        linear.weight, linear.is_settled = zeros(linear.weight.shape, dtype), True
        first = 0
        for part in parts:
            for rows in part.split(_PACKED_ROWS):
                pack_rows(rows.to(dtype), linear.weight[first // lanes :])
                first += len(rows)
        return linear

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.weight.dtype

    def unpacked(self) -> Tensor:
        """Return the weights [N, K]."""
        rows = self.weight.transpose(1, 2).flatten(0, 1).flatten(1)
        return rows[: self.out_features, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        function = torch.ops.sharesd.linear if torch.compiler.is_compiling() else _linear_cpu
        return function(x, self.weight, self.bias, self.out_features)


def pack_linears(model: nn.Module) -> int:
    """Replace every nn.Linear by a packed one; return the number.

    Each linear's weight is freed before the next is packed. Without CPU kernels all stay.
    """
    count = 0
    if not runs_cpp(torch.device("cpu")):
        return count
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                bias = None if child.bias is None else child.bias.detach()
                setattr(parent, name, PackedLinear(child.weight.detach(), bias))
                count += 1
    return count


def _linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    K = x.shape[-1]
    pair = weight.shape[3]
    assert x.dtype == weight.dtype, f"packed for {weight.dtype}, called with {x.dtype}"
    x_MK = F.pad(x, (0, K % pair)) if K % pair else x.contiguous()
    y = x.new_empty((*x.shape[:-1], out_features))
    sizes = x.numel() // K, out_features, weight.shape[1] * pair, torch.get_num_threads()
    call("linear", x.dtype, x_MK, weight, bias, y, *sizes)
    return y


define(
    "linear(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor",
    cpu=_linear_cpu,
    meta=lambda x, weight, bias, out_features: x.new_empty((*x.shape[:-1], out_features)),
)


class QuantizedPackedLinear(nn.Module):
    """Linear with packed weights of 4 or 8 bits.

    Activations are rounded to 8 or 16 bits. w = (code - middle) * scale + offset with one scale and offset (bfloat16)
    for each group of inputs of an output.
    """

    weight: Tensor  # uint8 [N / 16, groups, bytes]: codes, then scales and offsets, of 16 outputs and a group of inputs
    bias: Tensor | None
    is_settled = False
    """True if the weights are in their final memory."""

    def __init__(
        self,
        codes_NK: Tensor,
        scale_NG: Tensor,
        offset_NG: Tensor,
        bias_N: Tensor | None,
        bits: int,
        *,
        zeros: Zeros | None = None,
    ) -> None:
        """Pack `codes_NK`, uint8 below 2^bits; middle is 8 or 128.

        Inputs are a multiple of 32. `zeros` allocates the weights' final memory.
        """
        super().__init__()
        assert bits in (4, 8) and codes_NK.shape[1] % QUANTIZED_INPUT_MULTIPLE == 0
        self.out_features, self.in_features = codes_NK.shape
        self.bits, self.group_size = bits, self.in_features // scale_NG.shape[1]
        size = self.packed_size()
        self.is_settled = zeros is not None
        self.register_buffer("weight", codes_NK.new_empty(size) if zeros is None else zeros(size, torch.uint8))
        parts = zip(*(x.split(_PACKED_ROWS) for x in (codes_NK, scale_NG, offset_NG)), strict=True)
        for place, part in zip(self.weight.split(_PACKED_ROWS // 16), parts, strict=True):
            place.copy_(_pack_quantized(*part, bits=bits))
        self.register_buffer("bias", bias_N)

    @classmethod
    def restored(
        cls, packed: Tensor, bias_N: Tensor | None, N: int, K: int, bits: int, group_size: int, *, zeros: Zeros | None
    ) -> QuantizedPackedLinear:
        """Return a linear with a copy of the packed weights of another."""
        linear = cls.__new__(cls)
        nn.Module.__init__(linear)
        linear.out_features, linear.in_features, linear.bits, linear.group_size = N, K, bits, group_size
        size = linear.packed_size()
        assert packed.shape == size, f"{N} x {K} weights of {bits} bits are not of {tuple(packed.shape)}"
        linear.is_settled = zeros is not None
        weight = torch.empty(size, dtype=torch.uint8) if zeros is None else zeros(size, torch.uint8)
        linear.register_buffer("weight", weight.copy_(packed))
        linear.register_buffer("bias", bias_N)
        return linear

    def packed_size(self) -> tuple[int, int, int]:
        """Return the size of packed weights."""
        num_groups = self.in_features // self.group_size
        return -(-self.out_features // 16), num_groups, 16 * (self.group_size * self.bits // 8 + 4)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        return self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        function = torch.ops.sharesd.quantized_linear if torch.compiler.is_compiling() else _quantized_linear_cpu
        return function(x, self.weight, self.bias, self.out_features, self.group_size, self.bits)


def _pack_quantized(codes_NK: Tensor, scale_NG: Tensor, offset_NG: Tensor, *, bits: int) -> Tensor:
    """Pack some rows."""
    K, groups = codes_NK.shape[1], scale_NG.shape[1]
    codes_NK, scale_NG, offset_NG = (F.pad(x, (0, 0, 0, -len(x) % 16)) for x in (codes_NK, scale_NG, offset_NG))
    if bits == 4:
        halves = codes_NK.view(-1, 16, K // 8, 2, 4)
        packed = (halves[..., 0, :] | (halves[..., 1, :] << 4)).transpose(1, 2)
    else:
        packed = codes_NK.view(-1, 16, K // 4, 2, 2).transpose(3, 4).transpose(1, 2)
    factors = [
        values.to(torch.bfloat16).view(-1, 16, groups).transpose(1, 2).contiguous().view(torch.uint8)
        for values in (scale_NG, offset_NG)
    ]
    return torch.cat([packed.reshape(len(packed), groups, -1), *factors], 2)


def _quantized_linear_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, group_size: int, bits: int
) -> Tensor:
    x = x.contiguous()
    K = x.shape[-1]
    y = x.new_empty((*x.shape[:-1], out_features))
    sizes = x.numel() // K, out_features, K, group_size, bits, torch.get_num_threads()
    call("quantized_linear", x.dtype, x, weight, bias, y, *sizes)
    return y


define(
    "quantized_linear(Tensor x, Tensor weight, Tensor? bias, int out_features, int group_size, int bits) -> Tensor",
    cpu=_quantized_linear_cpu,
    meta=lambda x, weight, bias, out_features, *rest: x.new_empty((*x.shape[:-1], out_features)),
)


class WidenedLinear(PackedLinear):
    """Packed linear without a bias of float32 rows with bfloat16 weights [N / 16, K, 16, 1], widened in registers.

    Sums are those of float32 weights with the same values, at half the bytes.
    """

    def __init__(self, weight_NK: Tensor, zeros: Zeros) -> None:
        """Pack bfloat16 weights into memory from `zeros`; raises NotFinite."""
        super().__init__(torch.empty(weight_NK.shape, dtype=torch.float32, device="meta"), None)
        size = packed_size(self.out_features, self.in_features, torch.float32)
        self.weight, self.is_settled = zeros(size, torch.bfloat16), True
        _pack("pack_to_widen", torch.float32, weight_NK, self.weight)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def unpacked(self) -> Tensor:
        return super().unpacked().float()

    def dequantize(self, rows: Tensor) -> Tensor:
        """Return the weights of some outputs, float32 [..., K]."""
        return self._decode(rows, torch.float32)

    def _decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        lanes = self.weight.shape[2]
        return self.weight[rows // lanes, :, rows % lanes, 0].to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32, f"rows are float32, called with {x.dtype}"
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out_features))
        sizes = x.numel() // self.in_features, self.out_features, self.in_features, torch.get_num_threads()
        call("widened_linear", torch.float32, x, self.weight, y, *sizes)
        return y
