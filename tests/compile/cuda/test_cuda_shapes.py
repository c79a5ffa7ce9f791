"""Kernels compiled for GPUs that are not there, beyond a 7B in bfloat16: other dtypes, sizes and vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda import attention  # noqa: E402
from compile.cuda import grow as growing  # noqa: E402
from benchmark.gpu.absent import SHARED  # noqa: E402
from tests.compile.cuda.test_cuda_attention import parts_of  # noqa: E402

HALF, FULL = torch.float16, torch.float32
ON_ALL = pytest.mark.parametrize(
    "arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in SHARED if arch != 90)]
)


@ON_ALL
@pytest.mark.parametrize("d, G, dtype", [(64, 8, HALF), (128, 8, HALF), (64, 3, FULL), (128, 4, FULL), (256, 2, FULL)])
def test_attention(d: int, G: int, dtype: torch.dtype, arch: int, tmp_path: Path) -> None:
    D = 1 << (d - 1).bit_length()
    ROWS, BLOCK = attention.tile_of(G, D, dtype)
    sizes = {"K": 8, "G": G, "d": d, "D": D, "ROWS": ROWS, "BLOCK": BLOCK, "CAP": True}
    made = binary_of(attention.parts, arch, tmp_path, sizes, warps=4, stages=3, dtype=dtype)
    assert made.shared <= SHARED[arch]
    assert "tf32" not in made.ptx, "float32 is multiplied as such"


@ON_ALL
@pytest.mark.parametrize("top, levels, nodes", [(4, 5, 16), (8, 8, 64)], ids=["usual", "largest"])
def test_trees(top: int, levels: int, nodes: int, arch: int, tmp_path: Path) -> None:
    """The largest that anybody is likely to ask for may need memory for what registers do not hold."""
    C, lanes = top + (levels - 1) * top**2, top**2
    sizes, compared = {"C": C, "D": levels, "TOP": top, "DEPTHS": 8}, {"COMPARED": growing.COMPARED}
    for kernel, warps, more in (
        (growing._grow, 4, {"N": top**2, "LANES": lanes}),
        (growing._choose, 8, {"N": nodes, "LANES": 1 << (C - 1).bit_length(), "WIDTH": 2 * nodes, **compared}),
    ):
        given: dict[str, Any] = {name: torch.int64 for name in kernel.arg_names if name.endswith("_ptr")}
        given |= {name: FULL for name in given if "score" in name or "logp" in name}
        made = compile_for(arch, kernel, {**given, **sizes, **more}, tmp_path, warps=warps, stages=3)
        assert made.shared <= SHARED[arch]
        assert made.spilled == 0 or top == 8
