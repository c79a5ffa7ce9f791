"""AVX-VNNI, and AVX-512 without VNNI: the source for AVX2 with a few functions replaced; sums have the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
AVX2 = "-march=x86-64-v3 -O1"
"""Built in half of the time that the kernels' own -O3 takes, and with the same instructions for products."""
BUILD = "from compile.cpp_extension import library; library('block_ops'), library('float32')"
SUMS = """
import sys, torch
from compile.block_linear import BLOCK_TYPES, BlockLinear
from compile.linear import QuantizedPackedLinear
from tests.helpers.block_parts import random_part
dice = torch.Generator().manual_seed(0)
x = torch.randn(7, 512, generator=dice)
linears = {
    f"{name} {activations}": BlockLinear([random_part(name, 40, 512)], None, 512, activations=activations)
    for name in BLOCK_TYPES for activations in ("exact", "fast")
}
for bits in (4, 8):
    codes = torch.randint(2**bits, (40, 512), generator=dice, dtype=torch.uint8)
    scale, offset = torch.rand(2, 40, 8, generator=dice)
    linears[f"{bits} bits"] = QuantizedPackedLinear(codes, scale, offset, None, bits=bits)
torch.save({name: torch.cat([linear(x[:1]), linear(x)]) for name, linear in linears.items()}, sys.argv[1])
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.subprocess,
    pytest.mark.skipif(" avx2 " not in CPU, reason="needs AVX2"),
    pytest.mark.skipif("-march" in os.environ.get("SHARESD_CXXFLAGS", ""), reason="runs with this processor's kernels"),
]


def run(script: str, flags: str, *arguments: str) -> None:
    environment = {**os.environ, "SHARESD_CXXFLAGS": flags}
    done = subprocess.run([sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "feature"), [(f"{AVX2} -mavxvnni", " avx_vnni "), ("-march=x86-64-v4 -O1", " avx512bw ")]
)
def test_sums_are_those_of_avx2(flags: str, feature: str, tmp_path: Path) -> None:
    """Built on every machine with AVX2, and run where the processor has the feature."""
    run(BUILD, flags)
    if feature in CPU:
        for name, each in (("ours", flags), ("wanted", AVX2)):
            run(SUMS, each, str(tmp_path / name))
        ours, wanted = torch.load(tmp_path / "ours"), torch.load(tmp_path / "wanted")
        assert len(ours) > 40
        for name, values in ours.items():
            assert torch.equal(values, wanted[name]), name
