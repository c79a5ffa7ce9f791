"""Timings of large models by their first blocks, and predicted costs of more rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sharesd.config import EngineConfig
from sharesd.engine import cost_profiler
from sharesd.engine.cost_profiler import BlockSample, measure_costs, profile_costs
from sharesd.engine.warmup import warm_up, warm_up_all_variants
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.cost_model import Costs, of_more_rows


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint(layers=4))


@pytest.fixture
def runtime(folder: str, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr(cost_profiler, "SAMPLE_BYTES", 1)
    return Runtime(EngineConfig(target=folder, mode="share", max_context=128, max_batch=2))


def test_the_first_blocks_stand_for_all(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    target, ran = runtime.target, []
    stack = target.run_stack
    monkeypatch.setattr(stack, "_run", lambda blocks, *_: ran.append(blocks.num_blocks))
    clock = iter([0.0, 2.0, 10.0, 15.0])  # without a block 2 seconds, with one of four 5
    monkeypatch.setattr(cost_profiler.time, "perf_counter", lambda: next(clock))
    sample = BlockSample(target)
    num = len(target.blocks)
    assert not sample.is_whole
    assert sample.seconds(lambda: [stack._run(each, None, None, None) for each in target.ranges()]) == 2 + num * 3
    assert ran == [0, 1] and [each.num_blocks for each in target.ranges()] == [num]


def test_small_models_and_others_are_timed_whole(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BlockSample(None).is_whole and BlockSample(object()).is_whole  # type: ignore[arg-type]
    monkeypatch.setattr(cost_profiler, "SAMPLE_BYTES", 2**40)
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
    warm_up_all_variants(engine)
    assert all(variant.policy.live.drift == 1.0 for variant in engine._variants._variants.values())
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
    longest = runtime.engine().num_draft
    assert set(costs.step) == {1, 2, 1 + longest // 4, 1 + longest}
    assert min(costs.step.values()) > 0 and costs.draft > 0


def test_slots_of_a_sample_cost_what_one_block_takes_longer(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = runtime.engine()
    monkeypatch.setattr(cost_profiler, "_step", lambda *_: lambda: None)
    monkeypatch.setattr(cost_profiler, "_timed", lambda _: 1e3 if engine.cache.lengths.max().item() > 64 else 1.0)
    costs, _ = measure_costs(engine, SamplingParams())
    longest = 1 + engine.num_draft
    assert 0 < costs.step_slot[1] < costs.step_slot[2] < costs.step_slot[longest]
    assert costs.step_slot[longest] * engine.max_context > 999 * len(runtime.target.blocks)
