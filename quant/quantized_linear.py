"""Turn a `QuantizedWeight` into a module that multiplies by it: which kernel serves which device, dtype and bits.

| device    | dtype            | 8 bits      | 4 bits     | 3, 2 bits                      |
| --------- | ---------------- | ----------- | ---------- | ------------------------------ |
| cpu       | bf16, fp16, fp32 | torch int8  | torch int4 | torch int4: no bytes are saved |
| cuda      | bf16, fp16, fp32 | gemlite     | gemlite    | 2: gemlite; 3: refused         |
| any       | float64          | dequantized on every call: slow, for tests                 |

Legend: N output features, K input features, M rows, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from quant.hqq import QuantizedWeight, dequantize
from quant.lazy import lazy_import
from quant.switch_linear import LowLinear

LowBuilder = Callable[[QuantizedWeight, Tensor | None, torch.dtype], LowLinear]

GEMLITE_BITS = (8, 4, 2)
"""Codes that gemlite has kernels for."""
GEMLITE_ROWS = 16
"""Rows that gemlite's kernels are called with at most."""
_GROUP_MODE, _ADDS_ZERO = 10, 4  # of gemlite's metadata: w = q * scale + zero, not (q - zero) * scale
READ_BEYOND = 1024
"""Inputs behind the last one whose scales and zeros gemlite may read: it masks weights at their end, not these."""
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Int4Linear(LowLinear):
    """torch's int4 kernel for CPUs: w = (code - 8) * scale + offset, which holds HQQ's (q - zero) * scale exactly.

    3- and 2-bit codes live in the same 4-bit container: they save no bytes over 4 bits here. Codes are shifted so that
    their middle meets the container's, which keeps the rounding of scale and offset to 16 bits small.
    """

    packed: Tensor  # uint8 [N, K/2], in an order of the kernel's own
    scales_and_offsets: Tensor  # [G, N, 2]

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(bias)
        self.out_features, self.in_features = weight.q.shape
        self.group_size = weight.group_size
        middle = 2 ** (weight.bits - 1)
        codes_NK = weight.q.to(torch.int32) + (8 - middle)
        offset_NG = (middle - weight.zero) * weight.scale
        scales_and_offsets_GN2 = torch.stack([weight.scale.t(), offset_NG.t()], -1).to(dtype).contiguous()
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_NK, 1))
        self.register_buffer("scales_and_offsets", scales_and_offsets_GN2)

    def forward(self, x: Tensor) -> Tensor:
        x_MK = x.reshape(-1, self.in_features).contiguous()
        y_MN = torch.ops.aten._weight_int4pack_mm_for_cpu(x_MK, self.packed, self.group_size, self.scales_and_offsets)
        y = y_MN.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class Int8Linear(LowLinear):
    """torch's int8 kernel for CPUs: symmetric, one scale per row."""

    codes: Tensor  # int8 [N, K]
    scale: Tensor  # [N]

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(bias)
        self.out_features, self.in_features = weight.q.shape
        self.register_buffer("codes", _int8_codes(weight))
        self.register_buffer("scale", weight.scale.flatten().to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        x_MK = x.reshape(-1, self.in_features).contiguous()
        y_MN = torch.ops.aten._weight_int8pack_mm(x_MK, self.codes, self.scale)
        y = y_MN.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class ReferenceLinear(LowLinear):
    """Any bits in any dtype: the weights are dequantized on every call. For tests, where float64 has no kernel."""

    q: Tensor  # uint8 [N, K]
    scale: Tensor  # [N, G]
    zero: Tensor  # [N, G]

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(bias)
        self.register_buffer("q", weight.q)
        self.register_buffer("scale", weight.scale.to(dtype))
        self.register_buffer("zero", weight.zero.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, dequantize(self.q, self.scale, self.zero), self.bias)


class GemliteLinear(LowLinear):
    """gemlite's Triton kernels for GPUs: one launch per product of few rows.

    For more (prompts) they would be tuned anew for each number of rows, a minute each: weights are dequantized instead.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(bias)
        self.bits = weight.bits
        gemlite = lazy_import("gemlite")
        helper, device = gemlite.helper, weight.q.device
        # Triton launches on the device that is current.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if weight.bits == 8:
                gemlite.set_native_atomic_bfp16(False)  # parts of a sum, rounded each, lose what 8 bits gain
                packed = helper.A16W8_INT8(device=device, dtype=dtype).from_weights(
                    _int8_codes(weight), bias=None, scales=weight.scale
                )
            else:
                packed = helper.A16Wn(device=device, dtype=dtype).from_weights(
                    weight.q, weight.scale, weight.zero, weight.bits, weight.group_size
                )
        # Own the tensors: gemlite's module binds its forward to itself and does not survive a copy.
        per_group = (weight.scale.shape[1], weight.q.shape[0])
        tensors = [
            _before_zeros(tensor, READ_BEYOND // weight.group_size)
            if weight.bits < 8 and tensor.shape == per_group
            else tensor
            for tensor in packed.get_tensor_args()
        ]
        self._names = tuple(f"packed_{i}" for i in range(len(tensors)))
        for name, tensor in zip(self._names, tensors, strict=True):
            self.register_buffer(name, tensor.detach())
        self._meta = packed.get_meta_args()

    def forward(self, x: Tensor) -> Tensor:
        tensors = [getattr(self, name) for name in self._names]
        if x.numel() > GEMLITE_ROWS * x.shape[-1]:
            return nn.functional.linear(x, self._dequantized(*tensors[:3]).to(x.dtype), self.bias)
        return torch.ops.gemlite.forward_functional(x, self.bias, tensors, self._meta)

    def _dequantized(self, words: Tensor, scale_GN: Tensor, zero_GN: Tensor | None) -> Tensor:
        """[N, K] from gemlite's words [K / codes per word, N]: neighbouring inputs share one, lowest bits first."""
        if self.bits == 8:
            return words.t() * scale_GN.t()
        assert zero_GN is not None
        shifts = torch.arange(0, 8 * words.itemsize, self.bits, device=words.device)
        q_NK = ((words.t()[..., None] >> shifts) & (2**self.bits - 1)).flatten(1)
        if self._meta[_GROUP_MODE] == _ADDS_ZERO:
            scale_NG1, zero_NG1 = scale_GN.t()[..., None], zero_GN.t()[..., None]
            return (q_NK.unflatten(1, (len(scale_GN), -1)) * scale_NG1 + zero_NG1).flatten(1)
        return dequantize(q_NK, scale_GN.t(), zero_GN.t())


def check_low(
    name: str,
    shape: tuple[int, int],
    *,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    gemlite: bool = True,
) -> LowBuilder:
    """The class which serves a linear of shape (N, K), or ValueError naming the layer, the reason and the remedy.

    Without `gemlite` the caller has a kernel of its own for GPUs, one that takes 3 bits too.
    """
    N, K = shape
    proj = name.rpartition(".")[2]
    skip = f"leave {proj} full"
    what = f"{name} has {N} outputs and {K} inputs"
    if bits < 8 and K % group_size:
        raise ValueError(f"{what}, and groups of {group_size} do not divide {K}; use a smaller group size or {skip}")
    if dtype == torch.float64:
        return ReferenceLinear
    if dtype not in _KERNEL_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in (*_KERNEL_DTYPES, torch.float64))
        raise ValueError(
            f"{name} is {str(dtype).removeprefix('torch.')}, which hqq does not serve; use one of {allowed}"
        )
    if device.type == "cpu":
        if bits == 8 and K % 16:
            # Measured: the kernel reads past the end of such rows.
            raise ValueError(f"{what}, and the int8 kernel takes multiples of 16 inputs; {skip}")
        if bits < 8 and N % 16:
            raise ValueError(f"{what}, and the int4 kernel takes multiples of 16 outputs; use {proj}=8 or {skip}")
        return Int8Linear if bits == 8 else Int4Linear
    if device.type == "cuda":
        if bits == 3 and gemlite:
            raise ValueError(f"{name} has 3 bits, for which there is no GPU kernel; use 8, 4 or 2 bits")
        if K % 32:
            raise ValueError(f"{what}, and kernels for GPUs take multiples of 32 inputs; {skip}")
        if gemlite:
            lazy_import("gemlite")
        return GemliteLinear
    raise ValueError(f"{name} is on {device.type}, where hqq has no kernel; use cpu or cuda")


def build_low(name: str, weight: QuantizedWeight, bias: Tensor | None, *, dtype: torch.dtype) -> LowLinear:
    """The module that computes x @ weight.T + bias in `dtype` on the weight's device. ValueError as `check_low`."""
    N, K = weight.q.shape
    build = check_low(name, (N, K), bits=weight.bits, group_size=weight.group_size, dtype=dtype, device=weight.q.device)
    return build(weight, bias, dtype)


def _before_zeros(table_GN: Tensor, num_rows: int) -> Tensor:
    """A copy of the table with so many rows of zeros behind it in memory, where there might be NaN else."""
    room = table_GN.new_zeros(len(table_GN) + num_rows, table_GN.shape[1])
    room[: len(table_GN)] = table_GN
    return room[: len(table_GN)]


def _int8_codes(weight: QuantizedWeight) -> Tensor:
    """Codes 0..255 around 128 as int8 around 0."""
    return (weight.q.to(torch.int16) - 128).to(torch.int8)
