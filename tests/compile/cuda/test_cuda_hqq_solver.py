"""The solver of 4-bit codes as GPUs would run it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda.hqq_solver import WEIGHTS, solve_hqq
from tests.helpers.absent_gpu import gpu


@pytest.mark.parametrize(
    "arch", [90, pytest.param(80, marks=pytest.mark.long), pytest.param(120, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("group", [64, pytest.param(256, marks=pytest.mark.long)])
def test_weights_are_read_once_and_stay_in_registers(arch: int, group: int) -> None:
    with gpu(arch) as made:
        solve_hqq(torch.empty(100, 4 * group, dtype=torch.bfloat16, device="cuda"), 4, group)
    [solver] = made
    assert solver.grid[0] == -(-400 // (WEIGHTS // group)) and not solver.spilled
    assert len([code for _, code in solver.sass if "LDG" in code]) <= WEIGHTS // 128 // 8 + 1
