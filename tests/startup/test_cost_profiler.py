"""What a start times, for the draft policy; times themselves are in `tests/speculation/test_policy.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sharesd.sampling_params import SamplingParams
from sharesd.speculation.cost_model import Costs
from sharesd.startup import cost_profiler
from sharesd.startup.cost_profiler import measure_costs, profile_costs
from tests.helpers.oracle import share_engine, switched, tiny_mixture


def test_tokens_of_timed_steps_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ones would choose the same experts of a mixture, and hide what a wide step costs."""
    monkeypatch.setattr(cost_profiler, "MAX_SWEEPS", 1)
    model, switch = switched(tiny_mixture())
    engine, steps = share_engine(model, switch), list[list[int]]()

    def note(module: Any, given: tuple[torch.Tensor]) -> None:
        steps.extend(given[0].tolist())

    model.embed.register_forward_pre_hook(note)
    measure_costs(engine, engine.mode, SamplingParams())
    wide = [step[1:] for step in steps if len(step) > 2]
    assert wide and all(len(set(step)) == len(step) for step in wide)


@pytest.mark.parametrize("is_native", [True, False])
def test_all_numbers_of_rows_know_how_a_mixture_grows(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the steps of each number of rows are timed, and where they are predicted."""
    monkeypatch.setattr(cost_profiler, "_costs_of_rows", lambda *_: Costs({1: 1.0, 2: 1.5}))
    monkeypatch.setattr(cost_profiler, "is_native", lambda _: is_native)
    target = tiny_mixture()
    found = profile_costs(SimpleNamespace(batch_sizes=[1, 4], offloaded=False, target=target), "share", None, None)  # type: ignore[arg-type]
    rows = 4 if is_native else 1  # predicted costs count the tokens of all rows
    assert [found[1].growth(3), found[4].growth(3)] == [target.growth(3), target.growth(3 * rows)]
    assert found[1].growth(3) < 3 * found[1].growth(1)
