"""Runs compile/cuda/stream.cu on a CPU, as emulator.h says."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from compile.cpp_extension import compiler
from compile.cuda.stream import SOURCE, LaunchSizes, Op

HERE = Path(__file__).parent
Launch = tuple[Op, LaunchSizes, int]
"""A product, its sizes, and rows of x."""


class Broken(RuntimeError):
    """The kernel hangs, reads beyond its memory, or leaves copies behind."""


@cache
def library(group: int, bulk: bool, replaced: tuple[str, str] = ("", "")) -> ctypes.CDLL:
    """Build the kernel; `replaced`: a part of the source, and what to put in its place."""
    source = SOURCE.read_text()
    old, new = replaced
    assert old in source
    text = source.replace(old, new) if old else source
    flags = ("-O1", "-std=c++17", "-fPIC", "-shared", "-w", "-DEMULATOR", f"-DGROUP={group}", f"-DBULK={int(bulk)}")
    files = [HERE / "emulator.h", HERE / "host.cpp"]
    key = hashlib.sha256(b"".join((text.encode(), repr(flags).encode(), *(file.read_bytes() for file in files))))
    target = Path(tempfile.gettempdir()) / f"sharesd-emulator-{key.hexdigest()[:16]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix="sharesd-") as scratch:
            for file in files:
                shutil.copy(file, scratch)
            (Path(scratch) / "stream.cu").write_text(text)
            built = Path(scratch) / target.name
            subprocess.run([compiler(), *flags, str(Path(scratch) / "host.cpp"), "-o", str(built)], check=True)
            shutil.move(built, target)
    loaded = ctypes.CDLL(str(target))
    loaded.emulate.restype = ctypes.c_char_p
    return loaded


def run(launches: Sequence[Launch], group: int, *, bulk: bool = True, seed: int = 0, **built: tuple[str, str]) -> None:
    """Run products one after the other, as dependent launches; raises Broken."""
    count = len(launches)
    ops = (Op * count)(*(op for op, _, _ in launches))
    numbers = [
        (ctypes.c_int * count)(*each)
        for each in (
            [sizes.blocks for _, sizes, _ in launches],
            [rows for _, _, rows in launches],
            [sizes.shared for _, sizes, _ in launches],
        )
    ]
    failure = library(group, bulk, **built).emulate(ops, count, *numbers, ctypes.c_uint(seed))
    if failure:
        raise Broken(failure.decode())


class Recorder:
    """Stands in for `stream.launch`: runs each product at once, or collects them for `run`."""

    def __init__(self, *, bulk: bool = True, collects: bool = False) -> None:
        self.launches: list[Launch] = []
        self._bulk, self._collects = bulk, collects

    def __call__(self, op: Op, sizes: LaunchSizes, rows: int, group: int, device: torch.device) -> None:
        assert device.type == "cpu"
        self.launches.append((op, sizes, rows))
        if not self._collects:
            run([(op, sizes, rows)], group, bulk=self._bulk, seed=len(self.launches))
