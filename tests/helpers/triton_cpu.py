"""Triton's interpreter (TRITON_INTERPRET=1) fixed: its products of bfloat16 are wrong, it cuts off where GPUs round,
and it leaves sums to a BLAS, where those of a row may depend on its place (with OpenBLAS's kernels for AVX2 they do).
"""

import inspect
import math
from dataclasses import replace
from functools import cache

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
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


# ---- a third of its time went into what follows, which is done once here


@cache
def _names_of_builtins(module: object) -> list[str]:
    return [name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member)]


def _patch_builtin(module, builder, *scope):  # type: ignore[no-untyped-def]
    """For each launch, and each call of a function; what is patched already is no builtin."""
    for name in _names_of_builtins(module):
        if tl.core.is_builtin(member := getattr(module, name)):
            interpreter._patch_attr(module, name, member, builder, *scope)


@cache
def _constants(*shape: int) -> tuple[tl.constexpr, tl.tuple]:
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def _init_tensor(self, handle, type):  # type: ignore[no-untyped-def]
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _constants(*type.shape.values) if type.is_block() else _constants()


def _np_dtype(dtype: tl.dtype) -> np.dtype:
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _np_dtype_of_numbers(scalar)


interpreter._patch_builtin = _patch_builtin
_np_dtype_of_numbers, interpreter._get_np_dtype = cache(interpreter._get_np_dtype), _np_dtype
tl.tensor.__init__ = _init_tensor
# Sums and products of integers were repeated in 64 bits; what overflows shows in results.
builder = interpreter.interpreter_builder
builder.options = replace(builder.options, sanitize_overflow=False)
