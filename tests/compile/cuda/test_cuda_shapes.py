"""Kernels compiled for GPUs that are not there: trees, notes and sampling, as launches compile them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda import state_update
from compile.cuda import tree_expand as growing
from tests.helpers.absent_gpu import SHARED, gpu

ON_ALL = pytest.mark.parametrize(
    "arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in SHARED if arch != 90)]
)


@ON_ALL
@pytest.mark.parametrize("top, levels, most", [(4, 5, 16), (8, 8, 64)], ids=["usual", "largest"])
def test_trees(top: int, levels: int, most: int, arch: int) -> None:
    """The largest is what anybody is likely to ask for."""
    C = top + (levels - 1) * top**2
    with gpu(arch) as made:
        ints: Any = partial(torch.empty, dtype=torch.int64, device="cuda")
        reals: Any = partial(torch.empty, device="cuda")
        nodes = (ints(1, C), reals(1, C), ints(1, C, levels), ints(1, C))
        frontier = (ints(1, top), reals(1, top), ints(1, top, levels), ints(1, top, levels), ints(1, top))
        growing.expand_tree(ints(1), *nodes, *frontier, ints(1, top, top), reals(1, top, top))
        draft = (ints(1, most), ints(1, 1 + most), ints(1, 1 + most, 1 + most), ints(1, 1 + most))
        growing.select_nodes(ints(1), top, *nodes, *draft)
    assert all(each.shared <= SHARED[arch] * 1024 and each.spilled == 0 for each in made), [
        (each.name, each.spilled) for each in made
    ]


def test_notes_of_any_rows_are_one_binary() -> None:
    """Wherever views of the state of some rows begin."""
    for first in (0, 1):
        with gpu(90) as made:
            state = [torch.empty(3, dtype=torch.int64, device="cuda") for _ in range(4)]
            state = [each.as_strided((2,), (1,), first) for each in state]
            tokens = torch.empty(3, 3, dtype=torch.int64, device="cuda").as_strided((2, 3), (3, 1), 3 * first)
            logits = torch.empty(3, 3, 50, device="cuda").as_strided((2, 3, 50), (150, 50, 1), 150 * first)
            state_update.commit_round(*state, tokens, None, None, logits)
            state_update.write_draft_token(*state[:3], state[3].unsqueeze(1), tokens)
        if first == 0:
            wanted = [each.ptx for each in made]
    assert [each.ptx for each in made] == wanted
