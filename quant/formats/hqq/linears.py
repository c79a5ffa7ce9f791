"""Linears that multiply by a `QuantizedWeight`, by device, dtype and bits.

| device    | dtype            | 8 bits      | 4 bits     | 3, 2 bits                      |
| --------- | ---------------- | ----------- | ---------- | ------------------------------ |
| cpu       | bf16, fp16, fp32 | torch int8  | torch int4 | torch int4: no bytes are saved |
| cuda      | bf16, fp16, fp32 | gemlite     | gemlite    | 2: gemlite; 3: refused         |
| any       | float64          | dequantized on every call: slow, for tests                 |

Legend: N output features, K input features, M rows, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quant.formats import import_optional
from quant.formats.hqq.gemlite import GemliteLinear
from quant.quantized_weight import QuantizedWeight, dequantize, int8_codes
from quant.switch_linear import QuantizedLinear

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Int4Linear(QuantizedLinear):
    """Linear of torch's int4 kernel for CPUs.

    The kernel's w = (code - 8) * scale + offset represents HQQ's (q - zero) * scale exactly. Codes of 3 and 2 bits are
    stored in 4 bits, shifted so that their middle is 8, which keeps the error of 16-bit scales and offsets small.
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


class Int8Linear(QuantizedLinear):
    """Linear of torch's int8 kernel for CPUs: symmetric, one scale per row."""

    codes: Tensor  # int8 [N, K]
    scale: Tensor  # [N]

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(bias)
        self.out_features, self.in_features = weight.q.shape
        self.register_buffer("codes", int8_codes(weight))
        self.register_buffer("scale", weight.scale.flatten().to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        x_MK = x.reshape(-1, self.in_features).contiguous()
        y_MN = torch.ops.aten._weight_int8pack_mm(x_MK, self.codes, self.scale)
        y = y_MN.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class ReferenceLinear(QuantizedLinear):
    """Linear for tests in float64: weights are dequantized on every call."""

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


def check(
    name: str,
    shape: tuple[int, int],
    *,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    packs: bool = False,
) -> None:
    """Raise ValueError if no kernel supports a linear of shape (N, K).

    `packs`: the caller has a kernel of its own, which supports 3 bits on GPUs.
    """
    N, K = shape
    proj = name.rpartition(".")[2]
    skip = f"leave {proj} full"
    what = f"{name} has {N} outputs and {K} inputs"
    if bits < 8 and K % group_size:
        raise ValueError(f"{what}, and groups of {group_size} do not divide {K}; use a smaller group size or {skip}")
    if dtype == torch.float64:
        return
    if dtype not in _KERNEL_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in (*_KERNEL_DTYPES, torch.float64))
        raise ValueError(
            f"{name} is {str(dtype).removeprefix('torch.')}, which hqq does not serve; use one of {allowed}"
        )
    if device.type == "cpu":
        if bits == 8 and K % 16:
            # Measured: the kernel reads past the end of such rows.
            raise ValueError(f"{what}, and the int8 kernel needs multiples of 16 inputs; {skip}")
        if bits < 8 and N % 16:
            raise ValueError(f"{what}, and the int4 kernel needs multiples of 16 outputs; use {proj}=8 or {skip}")
        return
    if bits == 3 and not packs:
        raise ValueError(f"{name} has 3 bits, for which there is no GPU kernel; use 8, 4 or 2 bits")
    if K % 32:
        raise ValueError(f"{what}, and kernels for GPUs need multiples of 32 inputs; {skip}")
    if not packs:
        import_optional("gemlite")


def cpu_linear(
    name: str, weight: QuantizedWeight, bias: Tensor | None, *, dtype: torch.dtype, **_: int
) -> QuantizedLinear:
    """Return the linear of torch's kernels for CPUs; ValueError as `check`."""
    return _make(name, weight, bias, dtype, Int8Linear if weight.bits == 8 else Int4Linear)


def cuda_linear(
    name: str, weight: QuantizedWeight, bias: Tensor | None, *, dtype: torch.dtype, **_: int
) -> QuantizedLinear:
    """Return the linear of gemlite's kernels for GPUs; ValueError as `check`."""
    return _make(name, weight, bias, dtype, GemliteLinear)


def _make(
    name: str,
    weight: QuantizedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    kind: Callable[[QuantizedWeight, Tensor | None, torch.dtype], QuantizedLinear],
) -> QuantizedLinear:
    N, K = weight.q.shape
    check(name, (N, K), bits=weight.bits, group_size=weight.group_size, dtype=dtype, device=weight.q.device)
    return (ReferenceLinear if dtype == torch.float64 else kind)(weight, bias, dtype)
