"""Guard pages: every region that a kernel is handed lies right before, or right behind, a page that nobody may touch.

Tests marked `kernels` run so. GUARD_PAGES=behind (the default), before or off chooses the place. An element too far
then ends the process, always.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from compile import cpp_extension

PLACES = ("behind", "before", "off")
_place = "off"


def place() -> str:
    return _place


def put(wanted: str) -> None:
    """Guard what is allocated from now on, in this process."""
    global _place
    assert wanted in PLACES, f"GUARD_PAGES is {wanted!r}; give one of {PLACES}"
    if wanted == _place:
        return
    _place = wanted
    if wanted == "off":
        _allocator().unguard()
    else:
        _allocator().guard(wanted == "behind")


def install() -> None:
    """Let `put` reach all that kernels are handed. Call it before the modules that call kernels are imported."""
    cpp_extension.kernel = cache(_moving_arrays(cpp_extension.kernel))
    from compile import huge_pages, suffix_search  # what they take from `native` is guarded already

    huge_pages.zeros_like = _apart(huge_pages.zeros_like)
    suffix_search.suffix_finder = _moving_corpus(suffix_search.suffix_finder)


@cache
def _allocator() -> ctypes.CDLL:
    """Built once per source and torch; processes of one run share the file."""
    source, torch_folder = Path(__file__).with_name("guard.cpp"), Path(torch.__file__).parent
    key = hashlib.sha256(source.read_bytes() + f"{torch.__version__} {torch_folder}".encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"guard-pages-{key}" / "guard.so"
    built.parent.mkdir(exist_ok=True)
    with FileLock(built.with_suffix(".lock")):
        if not built.exists():
            compiler = shutil.which("g++") or shutil.which("c++") or "clang++"
            flags = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", f"-L{torch_folder}/lib"]
            partial = built.with_suffix(".partial")
            subprocess.run([compiler, str(source), *flags, "-lc10", "-o", str(partial)], check=True)
            partial.replace(built)
    return ctypes.CDLL(str(built))


def _apart(zeros_like: Callable) -> Callable:
    """Not side by side: each tensor has guards of its own."""

    @wraps(zeros_like)
    def guarded_zeros_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return zeros_like(tensors) if _place == "off" else [torch.zeros_like(t, device="cpu") for t in tensors]

    return guarded_zeros_like


def _moving_arrays(kernel: Callable) -> Callable:
    """Arrays of ctypes are tensors of the guarding allocator while the kernel runs."""

    def guarded_kernel(*args: Any) -> Callable[..., None]:
        function = kernel(*args)

        @wraps(function)
        def call(*args: Any) -> None:
            if _place == "off":
                function(*args)
                return
            arrays = {i: arg for i, arg in enumerate(args) if isinstance(arg, ctypes.Array)}
            moved = {i: torch.frombuffer(array, dtype=torch.uint8).clone() for i, array in arrays.items() if len(array)}
            given = {i: type(args[i]).from_address(memory.data_ptr()) for i, memory in moved.items()}
            function(*(given.get(i, arg) for i, arg in enumerate(args)))
            for i, memory in moved.items():
                ctypes.memmove(arrays[i], memory.data_ptr(), memory.nbytes)

        return call

    return guarded_kernel


def _moving_corpus(suffix_finder: Callable) -> Callable:
    def guarded_finder(backward: np.ndarray, order: np.ndarray, most: int) -> Callable[[Sequence[int]], Any]:
        given = (backward, order) if _place == "off" else (moved(backward), moved(order))
        return suffix_finder(*given, most)

    return guarded_finder


def moved(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array.view(np.uint8).copy()).clone().numpy().view(array.dtype)
