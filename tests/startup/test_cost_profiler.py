"""What a start times, for the draft policy; times themselves are in `tests/speculation/test_policy.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sharesd.sampling_params import SamplingParams
from sharesd.startup import cost_profiler
from sharesd.startup.cost_profiler import measure_costs
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
