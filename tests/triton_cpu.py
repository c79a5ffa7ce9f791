"""Triton's interpreter (TRITON_INTERPRET=1) mended: it multiplies bfloat16 wrongly, and cuts off where GPUs round."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_dot, _cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl


def _widened(handle: TensorHandle) -> TensorHandle:
    """bfloat16, which the interpreter keeps as 16-bit words and multiplies as such, in float32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _create_dot(self, a, b, *rest):  # type: ignore[no-untyped-def]
    return _dot(self, _widened(a), _widened(b), *rest)


def _cast_impl(self, source, wanted):  # type: ignore[no-untyped-def]
    if source.dtype.scalar != tl.float32 or wanted.scalar != tl.bfloat16:
        return _cast(self, source, wanted)
    rounded = torch.tensor(source.data).to(torch.bfloat16)
    return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)


InterpreterBuilder.create_dot = _create_dot
InterpreterBuilder.cast_impl = _cast_impl
