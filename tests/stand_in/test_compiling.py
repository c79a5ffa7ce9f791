"""Compiled code of Inductor and Triton is kept: a second start has the same forms and compiles none. Few kernels are
launched for a prompt, and few are nodes of a draft step's graph.

As a program, the counts of the embedded model: tests/stand_in/run.sh -m tests.stand_in.test_compiling COMPILE [MODE]...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sharesd.config import EngineConfig
from sharesd.sampling_params import SamplingParams
from tests.helpers.in_mode import in_mode
from tests.helpers.shared_runtimes import Shared
from tests.stand_in.decoding import load
from tests.stand_in.plausible import counts, install
from tests.stand_in.worker import run

LAYERS, TAPS = 2, 2
PER_LAYER, PER_TAP, BESIDE = 13, 5, 6
"""Kernels of a prompt: of a layer (`tests/compile/inductor` names them), of hidden states that a head reads, and of the
rest.
"""
DRAFT_STEP = 21
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


def compiled(config: EngineConfig) -> dict[str, int]:
    """Load and warm up; count forms, those of them that caches did not have, and files that were written there."""
    install()
    in_mode(load(config, (config.mode,)), warm=PARAMS)
    from torch._dynamo.utils import counters

    stats = counters["inductor"]
    return {
        "forms": counters["stats"]["unique_graphs"],
        "generated": stats["fxgraph_cache_miss"] + stats["fxgraph_cache_bypass"],
        "traced by autograd": counters["aot_autograd"]["autograd_cache_miss"],
        "kernels": len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))),
        "modules": len(list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.py"))),
    }


def launched(config: EngineConfig) -> dict[str, int]:
    """Kernels of a prompt of each size of pieces, and of the first and a further step of a chain of drafts."""
    from sharesd.models.prefill import PIECES, prefill
    from sharesd.startup.cost_profiler import models_of

    install()
    runtime = load(config, (config.mode,))
    engine, found = in_mode(runtime, warm=PARAMS), {}
    with torch.inference_mode():
        for size in PIECES:
            found[f"prompt of {size}"] = _kernels(partial(prefill, runtime.step, runtime.cache, [[0] * size], [0]))
        drafter = next(iter(models_of(engine, engine.mode)), None)
        if drafter is not None:
            chain = engine.variant(PARAMS).round().context.generators[drafter]._chain
            found |= {"first draft step": _kernels(chain._first), "draft step": _kernels(chain._next)}
    return found


def _kernels(call: Callable[[], Any]) -> int:
    before = counts()
    call()
    made = counts() - before
    return made["launches"] + made["blas"] + made["replayed"]


@pytest.fixture(scope="module")
def starts(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, int]]]:
    """What two starts of mode eagle count, with a cache folder that is empty before the first."""
    target = shared.checkpoint(hidden=128, layers=LAYERS)
    heads = (str(shared.head(target, "eagle3", dtype=torch.bfloat16)),)
    config = EngineConfig(target=str(target), heads=heads, mode="eagle", device="cuda", max_context=512)
    folder, calls = str(tmp_path_factory.mktemp("cache")), [partial(compiled, config), partial(launched, config)]
    found = [run(each, SHARESD_STAND_IN_CACHE=folder) for each in (calls, calls[:1])]
    for outcome in found[0] + found[1]:
        assert not outcome.error and not outcome.violations, outcome.error or outcome.log
    return [[outcome.value for outcome in start] for start in found]


def test_a_second_start_compiles_nothing(starts: list[list[dict[str, int]]]) -> None:
    first, second = (start[0] for start in starts)
    assert first["forms"] == first["generated"] == 2 + 2, "pieces of prompts, steps of the head; none of the target"
    assert second["forms"] == first["forms"]
    assert second["generated"] == second["traced by autograd"] == 0
    assert first["kernels"] and second["kernels"] == first["kernels"], "none was compiled by Triton"
    assert first["modules"] and second["modules"] == first["modules"]


def test_prompts_and_drafts_are_few_kernels(starts: list[list[dict[str, int]]]) -> None:
    found = starts[0][1]
    for size in (128, 256, 512):
        assert found[f"prompt of {size}"] <= PER_LAYER * LAYERS + PER_TAP * TAPS + BESIDE, found
    assert max(found["first draft step"], found["draft step"]) <= DRAFT_STEP, found


if __name__ == "__main__":
    _, compile, *modes = sys.argv
    for mode in modes or ("naive", "eagle", "glide"):
        config = EngineConfig(device="cuda", mode=mode, compile=compile)  # type: ignore[arg-type]
        print(mode, compiled(config), launched(config), flush=True)
