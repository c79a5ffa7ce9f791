"""Kernels compiled for GPUs that are not there, beyond a 7B in bfloat16: other dtypes, sizes and vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda import attention  # noqa: E402
from compile.cuda import grow as growing  # noqa: E402
from compile.cuda.gemm import row_gemm  # noqa: E402
from compile.cuda.settings import Device, by_rule  # noqa: E402
from tests.compile.cuda.test_cuda_attention import binary_of  # noqa: E402
from tests.compile.cuda.test_cuda_linear import GATED, NORM, PROCESSORS, RESIDUAL, arguments  # noqa: E402
from tests.helpers.ptx import SHARED, Binary, compile_for  # noqa: E402

HALF, FULL = torch.float16, torch.float32
SMALL = pytest.param(80, marks=pytest.mark.slow), pytest.param(89, marks=pytest.mark.slow), 90
ON_ALL = pytest.mark.parametrize("arch", SMALL)
BIAS = {"bias_ptr": torch.bfloat16}


def product(W: int, K: int, dtype: torch.dtype, arch: int, folder: Path, **given: Any) -> Binary:
    bits = 32 if dtype == FULL else 16
    tile = by_rule(W, K, bits, 0, Device("none", PROCESSORS[arch], SHARED[arch]))
    parts = {"parts_ptr": FULL, "counters_ptr": torch.int32} if tile.split > 1 else {}
    cut = {"BN": tile.outputs, "BK": tile.inputs, "SPLIT": tile.split, "STAGES": tile.stages}
    _, values = arguments(W, K, 16, arch, **{name: dtype for name in ("x_ptr", "w_ptr", "y_ptr")})
    values |= {"parts_ptr": None, "counters_ptr": None, "PACKED_MATH": bits == 16, **parts, **cut, **given}
    return compile_for(arch, row_gemm, values, folder, warps=tile.warps, stages=tile.stages, dependent=arch >= 90)


@ON_ALL
@pytest.mark.parametrize(
    "W, K, dtype, given",
    [
        (57344, 8192, torch.bfloat16, NORM | GATED),  # 70B
        (8192, 28672, torch.bfloat16, RESIDUAL),
        (151936, 896, torch.bfloat16, NORM),  # the smallest Qwen2.5 and its head
        (1152, 896, torch.bfloat16, NORM | BIAS),
        (896, 4864, torch.bfloat16, RESIDUAL),
        (128256, 4096, HALF, {}),
        (4096, 14336, HALF, {"residual_ptr": HALF}),
        (576, 1536, FULL, {"residual_ptr": FULL}),
        (3072, 576, FULL, {"norm_ptr": FULL} | GATED),
    ],
)
def test_products(W: int, K: int, dtype: torch.dtype, given: Any, arch: int, tmp_path: Path) -> None:
    made = product(W, K, dtype, arch, tmp_path, **given)
    assert made.shared <= SHARED[arch] and made.spilled == 0, (made.shared, made.spilled)
    assert "tf32" not in made.ptx, "float32 is multiplied as such"


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
