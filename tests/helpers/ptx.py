"""Triton kernels compiled for GPUs that are not there: what they need of one."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one program may use, by compute capability."""
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Binary:
    """A compiled kernel."""

    ptx: str
    shared: int
    registers: int
    spilled: int
    """Bytes of local memory: stack and spilled registers."""


def compile_for(
    arch: int, kernel: Any, arguments: dict[str, Any], folder: Path, *, warps: int, stages: int, dependent: bool = False
) -> Binary:
    """Compile a kernel. An argument is a dtype (a pointer), "i32", "fp32" or "fp64" (scalars), or a constant."""
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if isinstance(value, torch.dtype):
            signature[name] = _TYPES[value]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif value in ("i32", "fp32", "fp64"):
            signature[name] = value
        else:
            signature[name], constants[name] = "constexpr", value
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": dependent}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = folder / f"kernel{arch}.ptx"
    ptx.write_text(made.asm["ptx"])
    name = re.search(r"\.target (\w+)", made.asm["ptx"])
    assert name is not None
    command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={name[1]}", str(ptx), "-o", str(folder / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stack, stores, loads = map(int, re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", said))
    registers = re.search(r"Used (\d+) registers", said)
    assert registers is not None, said
    return Binary(made.asm["ptx"], made.metadata.shared, int(registers[1]), stack + stores + loads)
