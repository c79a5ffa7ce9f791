"""Timings of large models by their first blocks, and predicted costs of more rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sharesd.config import EngineConfig
from sharesd.engine import block_sample
from sharesd.engine.block_sample import BlockSample
from sharesd.engine.cost_profiler import measure_costs, profile_costs
from sharesd.engine.warmup import warm_up
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.cost_model import Costs
from sharesd.speculation.cost_profile import of_more_rows


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint(layers=4))


@pytest.fixture
def runtime(folder: str, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr(block_sample, "SAMPLE_BYTES", 1)
    return Runtime(EngineConfig(target=folder, mode="share", max_context=128, max_batch=2))


def test_the_first_blocks_stand_for_all(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    target, ran = runtime.target, []
    stack = target.run_stack
    monkeypatch.setattr(stack, "_run", lambda blocks, *_: ran.append(blocks.num_blocks))
    clock = iter([0.0, 2.0, 10.0, 15.0])  # without a block 2 seconds, with one of four 5
    monkeypatch.setattr(block_sample.time, "perf_counter", lambda: next(clock))
    sample = BlockSample(target)
    num = len(target.blocks)
    assert not sample.is_whole
    assert sample.seconds(lambda: [stack._run(each, None, None, None) for each in target.ranges()]) == 2 + num * 3
    assert ran == [0, 1] and [each.num_blocks for each in target.ranges()] == [num]


def test_small_models_and_others_are_timed_whole(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BlockSample(None).is_whole and BlockSample(object()).is_whole  # type: ignore[arg-type]
    monkeypatch.setattr(block_sample, "SAMPLE_BYTES", 2**40)
    assert BlockSample(runtime.target).is_whole


def test_warm_up_runs_a_model_whole_for_a_plain_step_alone(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    engine = runtime.engine()
    run = runtime.target.run_stack._run

    def counted(blocks, *others) -> None:
        ran.append(blocks.num_blocks)
        run(blocks, *others)

    monkeypatch.setattr(runtime.target.run_stack, "_run", counted)
    warm_up(engine, SamplingParams())  # without costs of earlier starts
    assert ran.count(len(runtime.target.blocks)) == 1
    costs = profile_costs(engine, SamplingParams(), None)
    assert set(costs) == set(engine.batch_sizes) and costs[2].step[1] >= costs[1].step[1] > 0


def test_texts_after_warm_up_are_those_of_all_blocks(runtime: Runtime, folder: str) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    plain = Runtime(EngineConfig(target=folder, mode="naive", max_context=128, max_batch=2, compile="off"))
    texts = [each.engine().generate([[1, 2, 3]], params)[0].token_ids for each in (runtime, plain)]
    assert texts[0] == texts[1]


def test_costs_of_more_rows_are_those_of_more_tokens() -> None:
    costs = Costs({1: 1.0, 4: 1.6}, 0.5, 0.0, {1: 0.1, 4: 0.1}, 0.2)
    more = of_more_rows(costs, 2)
    assert more.step == {1: pytest.approx(1.2), 4: pytest.approx(2.4)}
    assert more.draft == pytest.approx(0.6) and more.step_slot == {1: 0.2, 4: 0.2} and more.draft_slot == 0.4
    assert of_more_rows(costs, 1) == costs


def test_measured_costs_of_a_sample_are_near_those_of_the_whole(runtime: Runtime) -> None:
    costs, _ = measure_costs(runtime.engine(), SamplingParams())
    assert set(costs.step) == {1, 1 + runtime.engine().num_draft // 4 or 2, 1 + runtime.engine().num_draft}
    assert min(costs.step.values()) > 0 and costs.draft > 0
