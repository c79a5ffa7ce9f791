"""Triton's interpreter (TRITON_INTERPRET=1) mended: its products of bfloat16 are wrong, it cuts off where GPUs round,
and it leaves sums to a BLAS, where those of a row may depend on its place (with OpenBLAS's kernels for AVX2 they do).
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_cast = InterpreterBuilder.cast_impl


def _widened(handle: TensorHandle) -> np.ndarray:
    """bfloat16, which the interpreter keeps as 16-bit words and multiplies as such, in float32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _create_dot(self, a, b, sums, *rest):  # type: ignore[no-untyped-def]
    """Products are added one by one, in the order of `b`'s rows, for every row of `a` alike."""
    left, right = (_widened(x).astype(sums.data.dtype) for x in (a, b))
    added = (left[..., :, :, None] * right[..., None, :, :]).sum(-2)
    return TensorHandle(added + sums.data, sums.dtype.scalar)


def _cast_impl(self, source, wanted):  # type: ignore[no-untyped-def]
    if source.dtype.scalar != tl.float32 or wanted.scalar != tl.bfloat16:
        return _cast(self, source, wanted)
    rounded = torch.tensor(source.data).to(torch.bfloat16)
    return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)


InterpreterBuilder.create_dot = _create_dot
InterpreterBuilder.cast_impl = _cast_impl
