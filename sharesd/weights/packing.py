"""How solved weights become the linear that a device's kernel multiplies with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from compile.cpp_extension import cache_root
from compile.cuda.gemm_config import device_file
from compile.linear import LOW_INPUTS, LowPackedLinear
from compile.op_registry import HAS_TRITON, runs_triton
from quant.hqq import QuantizedWeight
from quant.quantize_model import Build
from quant.quantized_linear import GEMLITE_BITS, GemliteLinear


def packed_for_cpu(weight: QuantizedWeight, bias: Tensor | None) -> LowPackedLinear:
    """In the layout of the CPU kernel. ValueError where that takes no linear of this shape."""
    N, K = weight.q.shape
    if K % LOW_INPUTS:
        raise ValueError(f"a linear has {K} inputs, not a multiple of {LOW_INPUTS}; use --compile regional")
    codes_NK, offset_NG, bits = centred(weight)
    return LowPackedLinear(codes_NK, weight.scale, offset_NG, bias, bits)


def builder_for_cuda(device: torch.device, dtype: torch.dtype, most_rows: int, batch: int = 1) -> Build | None:
    """In the layout of our kernel, or gemlite's where that was measured to be faster on this device and is installed.
    None for dtypes that our kernel does not take.
    """
    from compile.cuda.linear import DTYPES  # on GPUs only

    if dtype not in DTYPES:
        return None
    file, own = _choice_file(device), partial(rows_for_cuda, dtype=dtype, most_rows=most_rows, batch=batch)
    if not file.exists() or file.read_text() != "gemlite" or find_spec("gemlite") is None:
        return own

    def build(weight: QuantizedWeight, bias: Tensor | None) -> nn.Module:
        return GemliteLinear(weight, bias, dtype) if weight.bits in GEMLITE_BITS else own(weight, bias)

    return build


def has_low_kernels(device: torch.device) -> bool:
    """Can quantized linears run on a GPU, by our kernel or gemlite's?"""
    return runs_triton(device) or (HAS_TRITON and find_spec("gemlite") is not None)


def rows_for_cuda(
    weight: QuantizedWeight, bias: Tensor | None, *, dtype: torch.dtype, most_rows: int, batch: int = 1
) -> nn.Module:
    """A `LowRowLinear` of these weights."""
    from compile.cuda.lowbit import LowRowLinear

    codes_NK, offset_NG, bits = centred(weight)
    return LowRowLinear(codes_NK, weight.scale, offset_NG, bias, bits, dtype, most_rows, batch)


def choose_for_cuda(weight: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Seconds per product of one row, by our kernel and by gemlite's. The faster one is taken by later programs."""
    from compile.cuda.bench import seconds_per_call, turns

    builders: dict[str, Callable[..., nn.Module]] = {
        "own": partial(rows_for_cuda, most_rows=1),
        "gemlite": GemliteLinear,
    }
    x_MK = torch.randn(1, weight.q.shape[1], dtype=dtype, device=device)
    seconds, copies = {}, turns(weight.q.numel() * weight.bits // 8, device)
    for name, build in builders.items():
        linears = [build(weight, None, dtype=dtype) for _ in range(copies)]
        seconds[name] = seconds_per_call([partial(linear, x_MK) for linear in linears])
    file = _choice_file(device)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(min(seconds, key=seconds.__getitem__))
    return seconds


def _choice_file(device: torch.device) -> Path:
    name = device_file(torch.cuda.get_device_name(device)).removesuffix(".json")
    return cache_root() / "tiles" / f"low-bits-{name}.txt"


def centred(weight: QuantizedWeight) -> tuple[Tensor, Tensor, int]:
    """Codes around the middle of 4 or 8 bits (3 and 2 live in 4); what is added to (code - middle) * scale; bits."""
    container, middle = (8 if weight.bits == 8 else 4), 2 ** (weight.bits - 1)
    shift = 2 ** (container - 1) - middle
    return weight.q + shift if shift else weight.q, (middle - weight.zero) * weight.scale, container
