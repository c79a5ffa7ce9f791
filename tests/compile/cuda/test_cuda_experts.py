"""Products of experts compiled for GPUs that are not there: nothing done twice, and waits before memory is touched."""

from __future__ import annotations

from functools import partial
from itertools import product
from math import prod
from typing import NamedTuple
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda.block_form import FORMS, ExpertBlocks
from compile.cuda.experts import (
    block_tiles,
    choose_experts,
    expert_mlp,
    expert_tile,
    multiply_expert_blocks,
    multiply_experts,
    num_tiles,
)
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
            chosen = choose_experts(scores, bias, self.CHOSEN, E, normalised=True, scale=1.0, sum_eps=0.0)
            biases = (half(E, 2 * SIZE), half(E, D)) if self.biases else (None, None)
            products = [
                partial(multiply_experts, weight_EWK=half(E, *size), tile=tile, bias_EW=bias)
                for size, tile, bias in zip(((2 * SIZE, D), (D, SIZE)), self.tiles(arch), biases, strict=True)
            ]
            products[0] = partial(products[0], norm=half(D), eps=1e-6)
            expert_mlp(half(rows, D), *chosen, E, *products, gated=gated, residual_MD=half(rows, D))
        return made

    def stored_tile(self, arch: int, kind: str, outputs: int, inputs: int) -> Tile:
        with mock.patch("compile.cuda.gemm_config.device", lambda _: BY_ARCH[arch].device):
            [tile] = block_tiles(None, ExpertBlocks(torch.empty(0), [kind], [outputs]), inputs, self.CHOSEN)
        return tile

    def stored(self, arch: int, kind: str) -> list[Binary]:
        """Products of a row whose weights are blocks."""
        E, k, D, SIZE, gated, *_ = self
        form, products = FORMS[kind], []
        with gpu(arch) as made:
            half = partial(torch.empty, device="cuda", dtype=torch.bfloat16)
            for outputs, inputs in ((2 * SIZE, D), (D, SIZE)):
                tile = self.stored_tile(arch, kind, outputs, inputs)
                words = torch.empty(E, prod(form.records(outputs, inputs)), device="cuda", dtype=torch.int32)
                bias = half(E, outputs) if self.biases else None
                blocks = ExpertBlocks(words, [kind], [outputs])
                products.append(partial(multiply_expert_blocks, blocks=blocks, tiles=[tile], bias_EW=bias))
            experts = torch.empty(1, k, device="cuda", dtype=torch.int32)
            expert_mlp(half(1, D), experts, half(1, k).float(), E, *products, gated=gated)
        return [each for each in made if each.name == "block_row_gemm"]


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


STORED = [pytest.param(QWEN3, "Q6_K", 80, marks=pytest.mark.slow), pytest.param(GPT_OSS, "MXFP4", 90)]
STORED += [pytest.param(QWEN3, "Q4_K", arch, marks=pytest.mark.slow) for arch in (80, 86, 89, 90, 120)]


@pytest.mark.parametrize("mixture, kind, arch", STORED)
def test_stored_products_of_a_row(mixture: Mixture, kind: str, arch: int) -> None:
    """Two launches, whose programs are those of the chosen experts; codes are fetched ahead, and each product once."""
    made, form = mixture.stored(arch, kind), FORMS[kind]
    sizes = (2 * mixture.SIZE, mixture.D), (mixture.D, mixture.SIZE)
    for each, (outputs, inputs) in zip(made, sizes, strict=True):
        tile = mixture.stored_tile(arch, kind, outputs, inputs)
        assert prod(each.grid) == mixture.CHOSEN * -(-outputs // tile.outputs)
        assert each.shared <= SHARED[arch] * 1024
        assert count(each.loop, "LDG") == 0, "something in the loop is not fetched ahead of its use"
        assert count(each.loop, "LDL") <= 4 and count(each.loop, "STL") == 0, "registers are spilled in the loop"
        products = tile.outputs // 16 * 128 // 16 * ROWS // 8
        most = 2 * products if form.minimum else products
        assert not each.loop or products <= count(each.loop, "HMMA") * tile.warps <= most, "warps multiply the same"
        if arch >= 90:
            assert WAITS in each.ptx and MEMORY.search(each.ptx.split(WAITS)[0]) is None
