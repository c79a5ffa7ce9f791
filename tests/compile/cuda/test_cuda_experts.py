"""Products of experts compiled for GPUs that are not there: nothing done twice, and waits before memory is touched."""

from __future__ import annotations

from functools import partial
from math import prod

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda.experts import choose_experts, expert_mlp, expert_tile, num_tiles
from compile.cuda.gemm_config import ROWS, Tile, by_rule
from tests.compile.cuda.test_cuda_tiles import BY_ARCH, MEMORY, WAITS
from tests.helpers.absent_gpu import SHARED, Binary, count, gpu

E, CHOSEN, D, SIZE = 128, 8, 2048, 768  # Qwen3-30B-A3B


def tiles_of(arch: int) -> tuple[Tile, Tile]:
    find = partial(by_rule, bits=16, group=0, on=BY_ARCH[arch].device)
    return expert_tile(find, 2 * SIZE, D, CHOSEN), expert_tile(find, D, SIZE, CHOSEN)


def launches(arch: int, rows: int = 1) -> list[Binary]:
    """Kernels after the router, in order."""
    with gpu(arch) as made:
        half = partial(torch.empty, device="cuda", dtype=torch.bfloat16)
        chosen = choose_experts(half(rows, E), None, CHOSEN, normalised=True, scale=1.0, sum_eps=0.0)
        around = {"norm": half(D), "eps": 1e-6, "gated": "silu", "residual_MD": half(rows, D)}
        expert_mlp(half(rows, D), *chosen, half(E, 2 * SIZE, D), half(E, D, SIZE), tiles_of(arch), **around)
    return made


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (80, 86, 89, 120))])
def test_launches_of_a_row(arch: int) -> None:
    """Five launches, whose programs are those of the chosen experts; products have all in flight and no spill."""
    made = launches(arch)
    assert [each.name for each in made] == ["choose", "group", "row_gemm", "row_gemm", "join"]
    assert num_tiles(1, E, CHOSEN) == CHOSEN
    for each, outputs, tile in zip(made[2:4], (2 * SIZE, D), tiles_of(arch), strict=True):
        assert prod(each.grid) == CHOSEN * -(-outputs // tile.outputs)
        assert each.shared <= SHARED[arch] * 1024 and not each.spilled
        assert count(each.loop, "LDG") == 0, "something in the loop is not fetched ahead of its use"
        assert count(each.loop, "LDL") == count(each.loop, "STL") == 0
        if each.loop and arch != 90:
            products = tile.outputs // 16 * tile.inputs // 16 * ROWS // 8
            assert count(each.loop, "HMMA") * tile.warps == products, "warps multiply the same"
    for each in made if arch >= 90 else ():
        assert WAITS in each.ptx and MEMORY.search(each.ptx.split(WAITS)[0]) is None, each.name
