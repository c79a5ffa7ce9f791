"""Compiled code of Inductor and Triton is kept: a second start has the same forms and compiles none. Few kernels are
launched for a prompt, and few are nodes of a draft step's graph.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sharesd.config import EngineConfig
from tests.helpers.shared_runtimes import Shared
from tests.stand_in.compiling import compiled, launched
from tests.stand_in.worker import Outcome, run

LAYERS, TAPS = 2, 2
PER_LAYER, PER_TAP, BESIDE = 13, 5, 6
"""Kernels of a prompt: of a layer (`tests/compile/inductor` names them), of hidden states that a head reads, and of the
rest.
"""
DRAFT_STEP = 21


@pytest.fixture(scope="module")
def starts(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> list[list[Outcome]]:
    """Two starts of mode eagle, with a cache folder that is empty before the first."""
    target = shared.checkpoint(hidden=128, layers=LAYERS)
    head = shared.head(target, "eagle3", dtype=torch.bfloat16)
    config = EngineConfig(target=str(target), heads=(str(head),), device="cuda", max_context=512)
    calls = [partial(compiled, config, "eagle"), partial(launched, config, "eagle")]
    folder = str(tmp_path_factory.mktemp("cache"))
    found = [run(calls, SHARESD_STAND_IN_CACHE=folder) for _ in range(2)]
    for start in found:
        for outcome in start:
            assert not outcome.error and not outcome.violations, outcome.error or outcome.log
    return found


def test_a_second_start_compiles_nothing(starts: list[list[Outcome]]) -> None:
    first, second = (start[0].value for start in starts)
    assert first["forms"] == first["generated"] >= 2 + 4 + 2, "steps, pieces of prompts, steps of the head"
    assert second["forms"] == first["forms"]
    assert second["generated"] == second["traced by autograd"] == 0
    assert first["kernels"] and second["kernels"] == first["kernels"], "none was compiled by Triton"
    assert first["modules"] and second["modules"] == first["modules"]


def test_prompts_and_drafts_are_few_kernels(starts: list[list[Outcome]]) -> None:
    found = starts[0][1].value
    for size in (128, 256, 512):
        assert found[f"prompt of {size}"] <= PER_LAYER * LAYERS + PER_TAP * TAPS + BESIDE, found
    assert max(found["first draft step"], found["draft step"]) <= DRAFT_STEP, found
