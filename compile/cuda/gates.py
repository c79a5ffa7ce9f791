"""`compile.fused_linear` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compile.cuda.dependent_launch import wait_for_predecessor
from compile.cuda.pdl import launch_options

BLOCK = 1024
"""Numbers of a program."""


@triton.jit(do_not_specialize=["T", "gates_b", "gates_t"])
def multiply_kernel(
    x_ptr,
    gates_ptr,
    residual_ptr,  # or None
    y_ptr,
    T,
    gates_b,
    gates_t,
    W: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * T, parts of a row). Rounds as tensor operations do."""
    wait_for_predecessor(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gates_ptr += row // T * gates_b + row % T * gates_t
    x = tl.load(x_ptr + row * W + i, mask=i < W, other=0.0)
    gate = tl.load(gates_ptr + i // (W // G), mask=i < W, other=0.0).to(tl.float32)
    gate = (1 / (1 + tl.exp(-gate))).to(x.dtype).to(tl.float32)
    y = (x.to(tl.float32) * gate).to(x.dtype)
    if residual_ptr is not None:
        y = (tl.load(residual_ptr + row * W + i, mask=i < W, other=0.0).to(tl.float32) + y.to(tl.float32)).to(x.dtype)
    tl.store(y_ptr + row * W + i, y, mask=i < W)


def multiply(x_BTW: Tensor, gates_BTG: Tensor, residual_BTW: Tensor | None) -> Tensor:
    """Run `compile.fused_linear.multiply_by_gates`."""
    (B, T, W), G, x_BTW = x_BTW.shape, gates_BTG.shape[2], x_BTW.contiguous()
    if gates_BTG.stride(2) != 1:
        gates_BTG = gates_BTG.contiguous()
    y_BTW = x_BTW.new_empty((B, T, W))
    multiply_kernel[(B * T, triton.cdiv(W, BLOCK))](
        *(x_BTW, gates_BTG, None if residual_BTW is None else residual_BTW.contiguous(), y_BTW),
        *(T, *gates_BTG.stride()[:2]),
        **{"W": W, "G": G, "BLOCK": BLOCK},
        **launch_options(x_BTW.device),
        enable_fp_fusion=False,
    )
    return y_BTW
