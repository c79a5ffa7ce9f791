"""Structs of Python and C++ have the same fields at the same offsets."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from compile import cpp_extension
from compile.native_structs import STRUCTS
from tests.helpers.paths import ROOT


def test_fields_are_where_the_kernels_read_them(tmp_path: Path) -> None:
    lines = []
    for name, struct in STRUCTS:
        lines.append(f"static_assert(sizeof(sharesd::{name}) == {ctypes.sizeof(struct)});")
        for field, *_ in struct._fields_:
            offset = getattr(struct, field).offset
            lines.append(f"static_assert(offsetof(sharesd::{name}, {field}) == {offset});")
    assert len(lines) > 90
    source = tmp_path / "structs.cpp"
    source.write_text("\n".join(["#include <cstddef>", '#include "head_step.h"', *lines]))
    command = [cpp_extension.compiler(), "-std=c++17", "-fopenmp", "-fsyntax-only", "-I", str(ROOT / "compile/cpu")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
