"""Triton's interpreter (TRITON_INTERPRET=1), which multiplies bfloat16 wrongly, mended."""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_dot = InterpreterBuilder.create_dot


def _widened(handle: TensorHandle) -> TensorHandle:
    """bfloat16, which the interpreter keeps as 16-bit words and multiplies as such, in float32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _create_dot(self, a, b, *rest):  # type: ignore[no-untyped-def]
    return _dot(self, _widened(a), _widened(b), *rest)


InterpreterBuilder.create_dot = _create_dot
