"""Triton kernels compiled for GPUs that are not there, as launches of the host's code would compile them there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
"""KB of shared memory that one program may use, by compute capability; a processor has one more."""


@dataclass(frozen=True)
class Binary:
    """A kernel as a launch compiled it."""

    name: str
    arch: int
    grid: tuple[int, ...]
    warps: int
    asm: dict[str, Any]
    shared: int

    @property
    def ptx(self) -> str:
        return self.asm["ptx"]

    @property
    def ttgir(self) -> str:
        """Triton's own last form, in which buffers and layouts are seen."""
        return self.asm["ttgir"]

    @cached_property
    def _usage(self) -> dict[str, int]:
        return {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", self._dumped("-res-usage"))}

    @property
    def spilled(self) -> int:
        """Bytes of local memory of each thread: its stack, with the registers that are spilled to it."""
        return self._usage["STACK"] + self._usage["LOCAL"]

    @cached_property
    def sass(self) -> list[tuple[int, str]]:
        """Addresses and instructions of the machine's code."""
        found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]+);", self._dumped("-sass"))
        return [(int(address, 16), code) for address, code in found]

    @property
    def loop(self) -> list[str]:
        """Instructions of the loop that copies most to shared memory, and has no other in it; none without one."""
        jumps = ((at, re.search(r"\bBRA\S* .*?(0x[0-9a-f]+)", code)) for at, code in self.sass)
        spans = [(int(jump[1], 16), at) for at, jump in jumps if jump is not None and int(jump[1], 16) < at]
        inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
        bodies = [[code for at, code in self.sass if first <= at <= last] for first, last in inner]
        return max(bodies, key=lambda body: count(body, "LDGSTS"), default=[])

    def resident(self) -> int:
        """Programs that a processor holds at once, as far as registers, warps and shared memory go."""
        registers = 65536 // (-(-self._usage["REG"] // 8) * 8 * 32 * self.warps)
        warps = {80: 64, 90: 64}.get(self.arch, 48) // self.warps
        shared = (SHARED[self.arch] + 1) * 1024 // (self.shared + 1024)
        return min(registers, warps, shared)

    def _dumped(self, option: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def count(code: list[str], name: str) -> int:
    return sum(bool(re.search(rf"(^|\s){name}\b", line)) for line in code)


class _Pointer:
    """A tensor as a launch looks at it: a type, and an address that is aligned as the real one."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self._address = tensor.dtype, int(tensor.storage_offset()) * tensor.itemsize

    def data_ptr(self) -> int:
        return self._address


def use_driver(arch: int, device: int = 0, **more: Any) -> None:
    """Have Triton ask a driver that is made up, for a GPU of this compute capability; `more`: further answers."""
    target = GPUTarget("cuda", arch, 32)
    answers = {"get_current_target": lambda: target, "get_current_device": lambda: device} | more
    driver.set_active(SimpleNamespace(get_current_stream=lambda device=0: 0, **answers))


@contextmanager
def gpu(arch: int) -> Iterator[list[Binary]]:
    """Tensors of device cuda have no values within, and launches of kernels are compiled for `arch`, and noted."""
    made: list[Binary] = []
    run, before = JITFunction.run, driver._active

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = [_Pointer(x) if isinstance(x, Tensor) else x for x in args]
        kernel = run(self, *given, grid=grid, warmup=True, **kwargs)
        about = kernel.metadata
        made.append(Binary(about.name, arch, tuple(grid), about.num_warps, kernel.asm, about.shared))

    capability = mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: divmod(arch, 10))
    use_driver(arch, device=arch)  # what is compiled is kept by device
    try:
        with FakeTensorMode(), capability, mock.patch.object(JITFunction, "run", compiled):
            yield made
    finally:
        driver._active = before
