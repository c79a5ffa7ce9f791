"""Guard pages: every region that a kernel is handed lies right before, or right behind, a page that nobody may touch.

GUARD_PAGES=behind (or before) has it for a whole test process. An element too far then ends the process, always.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compile import native

PLACES = ("behind", "before")


def install(place: str) -> None:
    """From now on, in this process. Before the modules that call kernels are imported."""
    assert place in PLACES, f"GUARD_PAGES is {place!r}; give one of {PLACES}"
    _allocator().guard(place == "behind")
    native.kernel = _moving_arrays(native.kernel)
    from compile import find, pages  # what they take from `native` is guarded already

    pages.zeros_like = lambda tensors: [torch.zeros_like(tensor) for tensor in tensors]  # not side by side
    find.finder = _moving_corpus(find.finder)


def _allocator() -> ctypes.CDLL:
    source, torch_folder = Path(__file__).with_name("guard.cpp"), Path(torch.__file__).parent
    compiler = shutil.which("g++") or shutil.which("c++") or "clang++"
    with tempfile.TemporaryDirectory() as folder:
        built = f"{folder}/guard.so"
        flags = ("-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10")
        subprocess.run([compiler, str(source), *flags, "-o", built], check=True)
        return ctypes.CDLL(built)


def _moving_arrays(kernel: Callable) -> Callable:
    """Arrays of ctypes are tensors of the guarding allocator while the kernel runs."""

    def guarded_kernel(*args: Any) -> Callable[..., None]:
        function = kernel(*args)

        @wraps(function)
        def call(*args: Any) -> None:
            arrays = {i: arg for i, arg in enumerate(args) if isinstance(arg, ctypes.Array)}
            moved = {i: torch.frombuffer(array, dtype=torch.uint8).clone() for i, array in arrays.items() if len(array)}
            function(
                *(type(arg).from_address(moved[i].data_ptr()) if i in moved else arg for i, arg in enumerate(args))
            )
            for i, memory in moved.items():
                ctypes.memmove(arrays[i], memory.data_ptr(), memory.nbytes)

        return call

    return guarded_kernel


def _moving_corpus(finder: Callable) -> Callable:
    def guarded_finder(backward: np.ndarray, order: np.ndarray, most: int) -> Callable[[Sequence[int]], Any]:
        return finder(*(moved(array) for array in (backward, order)), most)

    return guarded_finder


def moved(array: np.ndarray) -> np.ndarray:
    """A copy in a tensor's memory."""
    return torch.from_numpy(array.view(np.uint8).copy()).clone().numpy().view(array.dtype)
