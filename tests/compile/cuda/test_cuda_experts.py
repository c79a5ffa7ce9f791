"""Products of experts compiled for GPUs that are not there: nothing done twice, and waits before memory is touched."""

from __future__ import annotations

from functools import partial
from itertools import product
from math import prod
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda.experts import choose_experts, expert_mlp, expert_tile, num_tiles
from compile.cuda.gemm_config import ROWS, Tile, by_rule
from tests.compile.cuda.test_cuda_tiles import BY_ARCH, MEMORY, WAITS
from tests.helpers.absent_gpu import SHARED, Binary, count, gpu


class Mixture(NamedTuple):
    E: int
    CHOSEN: int
    D: int
    SIZE: int
    gated: str = "silu"
    biases: bool = False
    choice_bias: bool = False

    def tiles(self, arch: int) -> tuple[Tile, Tile]:
        find = partial(by_rule, bits=16, group=0, on=BY_ARCH[arch].device)
        return expert_tile(find, 2 * self.SIZE, self.D, self.CHOSEN), expert_tile(find, self.D, self.SIZE, self.CHOSEN)

    def launches(self, arch: int, rows: int = 1) -> list[Binary]:
        """Kernels after the router, in order."""
        E, _, D, SIZE, gated, *_ = self
        with gpu(arch) as made:
            half = partial(torch.empty, device="cuda", dtype=torch.bfloat16)
            scores, bias = (half(rows, E).float(), half(E).float()) if self.choice_bias else (half(rows, E), None)
            chosen = choose_experts(scores, bias, self.CHOSEN, normalised=True, scale=1.0, sum_eps=0.0)
            around = {"norm": half(D), "eps": 1e-6, "gated": gated, "residual_MD": half(rows, D)}
            around |= {"gate_up_bias_EW": half(E, 2 * SIZE), "down_bias_ED": half(E, D)} if self.biases else {}
            expert_mlp(half(rows, D), *chosen, half(E, 2 * SIZE, D), half(E, D, SIZE), self.tiles(arch), **around)
        return made


QWEN3 = Mixture(128, 8, 2048, 768)  # 30B-A3B
GLM = Mixture(128, 8, 4096, 1408, choice_bias=True)  # 4.5-Air
GPT_OSS = Mixture(32, 4, 2880, 2880, "swiglu_oai", biases=True)  # 20b
OTHERS = [pytest.param(*each, marks=pytest.mark.slow) for each in product((GLM, GPT_OSS), (90, 80))]
OTHERS += [pytest.param(QWEN3, arch, marks=pytest.mark.slow) for arch in (80, 86, 89, 120)]


@pytest.mark.parametrize("mixture, arch", [(QWEN3, 90), *OTHERS])
def test_launches_of_a_row(mixture: Mixture, arch: int) -> None:
    """Five launches, whose programs are those of the chosen experts; products have all in flight and no spill."""
    made, (E, CHOSEN, D, SIZE, *_) = mixture.launches(arch), mixture
    assert [each.name for each in made] == ["choose", "group", "row_gemm", "row_gemm", "join"]
    assert num_tiles(1, E, CHOSEN) == CHOSEN
    for each, outputs, tile in zip(made[2:4], (2 * SIZE, D), mixture.tiles(arch), strict=True):
        assert prod(each.grid) == CHOSEN * -(-outputs // tile.outputs)
        assert each.shared <= SHARED[arch] * 1024 and not each.spilled
        assert count(each.loop, "LDG") == 0, "something in the loop is not fetched ahead of its use"
        assert count(each.loop, "LDL") == count(each.loop, "STL") == 0
        if each.loop and arch != 90:
            products = tile.outputs // 16 * tile.inputs // 16 * ROWS // 8
            assert count(each.loop, "HMMA") * tile.warps == products, "warps multiply the same"
    for each in made if arch >= 90 else ():
        assert WAITS in each.ptx and MEMORY.search(each.ptx.split(WAITS)[0]) is None, each.name
