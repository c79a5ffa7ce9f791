"""Rounds that are launched before the one in front of them has been read: texts are those of plain decoding, whatever
is drafted, whoever joins, leaves or is cancelled; times are those that passed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile.adaptive_threads import STEP_THREADS
from compile.device_timer import Clock
from sharesd.engine.engine import Engine
from sharesd.engine.loaded_mode import DecodeVariant
from sharesd.engine.output_processor import OutputProcessor
from sharesd.engine.outputs import Completion
from sharesd.engine.round_launcher import RoundLauncher
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_policy import Policy
from sharesd.speculation.draft_tree import NO_DRAFT, DraftRecord, DraftShape, DraftTree
from tests.drafters.test_eagle import TREE, built
from tests.engine import test_grammar
from tests.engine.test_rows import MODEL, REQUESTS, alone, check_load, new, parts_of
from tests.helpers.fake_time import fake_time
from tests.helpers.oracle import new_engine
from tests.helpers.tiny_heads import random_head

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = ("eagle", "eagle3", "parallel", "glide")
STOPS = SamplingParams(max_new_tokens=24, stop=("ab", "er."), temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def wanted() -> list[Completion]:
    return alone(REQUESTS[:40])


def launched_ahead(mode: str, *, batch: int = 3, async_scheduling: bool = True, **options: Any) -> Engine:
    kind, tree = mode.removesuffix(" tree"), TREE if mode.endswith("tree") else None
    options |= {"batch": batch, "async_scheduling": async_scheduling, "auto_length": True, "tree": tree}
    return built(random_head(MODEL, kind), MODEL, **options) if kind in HEADS else new(kind, **options)


def noted(draft: Callable[..., DraftTree], drafts: list[Any]) -> Callable[..., DraftTree]:
    def noted_draft(*how: Any) -> DraftTree:
        tree = draft(*how)
        drafts.append(tree.tokens.tolist())
        return tree

    return noted_draft


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each round, True where another one was on its way."""
    found, launch = [], RoundLauncher.launch

    def counted(self: RoundLauncher, before: Any = None) -> Any:
        flight = launch(self, before)
        if flight is not None:
            found.append(before is not None)
        return flight

    monkeypatch.setattr(RoundLauncher, "launch", counted)
    return found


@pytest.fixture
def any_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain rounds and drafts of all shapes, one after the other."""
    dice = random.Random(5)

    def some_shape(self: DecodeVariant, num_idle: int) -> DraftShape:
        shapes = [*self.policy.shapes, self.policy.shapes[-1]] if dice.random() < 0.7 else []
        return dice.choice([NO_DRAFT, *shapes])

    monkeypatch.setattr(DecodeVariant, "shape", some_shape)


@pytest.mark.parametrize("mode", ["naive", "share", "classic", "share tree", *HEADS])
def test_a_load_of_requests_gives_each_what_it_gets_alone(
    mode: str, wanted: list[Completion], launches: list[bool], any_draft: None
) -> None:
    engine = launched_ahead(mode, prefill_chunk=16)
    assert engine.async_scheduling
    check_load(mode, engine, wanted)
    assert sum(launches) > len(launches) / (3 if mode.startswith("classic") else 1.5)


@pytest.mark.parametrize("mode", ["share", "classic", "classic tree", *HEADS, "eagle tree", "glide tree"])
def test_drafts_are_those_that_come_one_by_one(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After plain rounds, few and many, too: what the host does not know yet, the device does."""
    found = []
    for async_scheduling in (False, True):
        dice, drafts = random.Random(7), list[Any]()
        engine = launched_ahead(mode, batch=1, async_scheduling=async_scheduling)
        assert engine.drafter is not None
        often = [index % 16 not in (3, 4, *range(7, 15)) for index in range(90)]
        shapes = iter([dice.choice(engine.drafter.shapes) if drafted else NO_DRAFT for drafted in often])
        monkeypatch.setattr(DecodeVariant, "shape", lambda self, num_idle, shapes=shapes: next(shapes))
        monkeypatch.setattr(engine.drafter, "draft", noted(engine.drafter.draft, drafts))
        done = engine.generate([[21, 4, 4, 30, 8, 12, 1, 5]], SamplingParams(max_new_tokens=80))
        found.append((done[0].token_ids, engine.stats.accept_lengths, drafts))
    (texts, lengths, drafts), (texts_ahead, lengths_ahead, drafts_ahead) = found
    assert texts == texts_ahead and lengths == lengths_ahead
    assert drafts == drafts_ahead[: len(drafts)] and len(drafts) > 15


def test_a_draft_that_was_put_off_is_dropped_with_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, drafts = launched_ahead("classic", batch=2), list[Any]()
    assert engine.drafter is not None
    monkeypatch.setattr(DecodeVariant, "shape", lambda *_: NO_DRAFT)
    monkeypatch.setattr(engine.drafter, "draft", noted(engine.drafter.draft, drafts))
    engine.add([3, 17, 9], SamplingParams(max_new_tokens=40))
    for _ in range(3):
        engine.step()
    engine._launcher._deferred_shape = engine.drafter.shapes[-1]  # chosen by the policy of greedy rounds
    engine.add([5], SamplingParams(max_new_tokens=40, temperature=1.0))
    for _ in range(5):
        engine.step()
    assert not drafts


@pytest.mark.parametrize("mode", ["naive", "share", "classic", "eagle"])
def test_texts_end_at_stop_strings(mode: str, any_draft: None) -> None:
    prompts = [[3, 17, 9], [21, 4, 4, 30], [5], [8, 9, 10, 11], [1, 2]]
    want = new_engine(MODEL, batch=3).generate(prompts, STOPS)
    assert [*map(parts_of, launched_ahead(mode).generate(prompts, STOPS))] == [*map(parts_of, want)]
    assert {one.finish_reason for one in want} == {"stop", "length"}


@pytest.mark.parametrize("mode", ["hybrid", "hybrid classic", "ngram+recycle"])
def test_who_needs_the_tokens_is_launched_as_soon_as_they_are_read(
    mode: str, wanted: list[Completion], launches: list[bool]
) -> None:
    engine = new(mode, batch=3, async_scheduling=True, prefill_chunk=16, auto_length=False)
    early, record = [], OutputProcessor.record_transfers

    def at_the_end(self: OutputProcessor) -> None:
        early.append(engine._in_flight is not None)
        record(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputProcessor, "record_transfers", at_the_end)
        check_load(mode, engine, wanted)
    assert not any(launches) and sum(early) > len(early) / 2


@pytest.mark.parametrize("mode", ["ngram+recycle", "hybrid", "hybrid classic", "eagle3", "glide"])
def test_rounds_go_ahead_while_tables_pause(
    mode: str, wanted: list[Completion], launches: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are asked every other round; a second model would have to read what the host does not know."""
    dice = random.Random(9)

    def all_nodes(self: Policy, scores: Any, drafted: DraftShape = NO_DRAFT) -> tuple[int, float]:
        return min(max(map(len, scores), default=0), self.max_nodes() - drafted.nodes), 0.0

    asked = [False]

    def every_other(self: Policy) -> bool:
        asked[0] = not asked[0]
        return asked[0]

    monkeypatch.setattr(Policy, "tables_pause", property(lambda self: asked[0]))
    monkeypatch.setattr(Policy, "should_query_tables", every_other)
    monkeypatch.setattr(Policy, "num_table_nodes_worth", all_nodes)
    monkeypatch.setattr(Policy, "next_shape", lambda self, **_: dice.choice([NO_DRAFT, *self.shapes]))
    engine = launched_ahead(mode, prefill_chunk=16, **({"mixed": True} if mode in HEADS else {}))
    assert not engine.async_scheduling and engine.options.async_scheduling
    check_load(mode, engine, wanted)
    assert (sum(launches) > len(launches) / 4) == (mode != "hybrid classic")


FROM = -1.0
"""End of the round in front of it."""


@pytest.mark.parametrize(
    ("record", "wait"),
    [
        (DraftRecord(num_steps=2, model_marks=(0.5, 2.5)), 1.0 + 1.0),
        (DraftRecord("suffix"), 1.0 + 3.0),
    ],
    ids=["the model drafts", "it does not"],
)
def test_a_gpu_waits_while_it_makes_nothing_that_is_verified(record: DraftRecord, wait: float) -> None:
    tree, marks = DraftTree(torch.zeros(1, 2, dtype=torch.int64), record=record), (0.0, 3.0, 9.0)

    def waits(on_gpu: bool = True, has_queried: bool = True, before: float | None = FROM) -> Any:
        decision = SimpleNamespace(has_queried=has_queried)
        flight = SimpleNamespace(tree=tree, marks=[*marks], previous_end=before, decision=decision)
        processor = SimpleNamespace(_clock=Clock(torch.device("cpu")), _on_gpu=on_gpu)
        return OutputProcessor._table_wait_s(processor, flight, marks[1] - marks[0])  # type: ignore[arg-type]

    assert waits() == wait
    assert waits(before=None) == wait - 1.0, "a piece of a prompt was read in between"
    assert waits(on_gpu=False) is None and waits(has_queried=False) is None


WITH_GRAMMARS = [*test_grammar.REQUESTS[:12], ([1, 2], SamplingParams(max_new_tokens=80))]


@pytest.fixture(scope="module")
def wanted_of_grammars() -> list[Completion]:
    return alone(WITH_GRAMMARS, test_grammar.new("naive", batch=1))


@pytest.mark.parametrize("mode", ["share", "share tree", "hybrid"])
def test_rounds_with_grammars_wait_for_what_comes_out(
    mode: str, wanted_of_grammars: list[Completion], launches: list[bool]
) -> None:
    """And go ahead again once these have ended."""
    found = test_grammar.answers(test_grammar.new(mode, async_scheduling=True), WITH_GRAMMARS)
    assert [*map(parts_of, found)] == [*map(parts_of, wanted_of_grammars)]
    assert (0 < sum(launches) < len(launches)) == (mode != "hybrid")


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["a CPU", "a device that runs ahead"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("mode", ["naive", "share", "suffix", "hybrid", "classic"])
def test_rounds_take_the_time_that_passes(
    mode: str, async_scheduling: bool, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks: reports, the policy, control of threads and of prompts."""
    engine = new(mode, batch=2, async_scheduling=async_scheduling, max_context=300)
    told: dict[str, float] = {"policy": 0.0, "threads": 0.0, "prompts": 0.0, "plain": 0.0}
    prefill = engine._scheduler.prefill
    record, took = Policy.record, prefill.record_round_time

    def recorded(self: Any, decision: Any, tree: Any, paths: Any, draft_s: float, step_s: float, *rest: Any) -> None:
        told["policy"] += draft_s + step_s
        told["plain"] += 0.0 if tree.tokens.shape[1] else draft_s + step_s
        record(self, decision, tree, paths, draft_s, step_s, *rest)

    def taken(round_s: float) -> None:
        told["prompts"] += round_s
        took(round_s)

    def record_round(seconds: float, work: float) -> None:
        told["threads"] += seconds

    monkeypatch.setattr(Policy, "record", recorded)
    monkeypatch.setattr(STEP_THREADS, "record_round", record_round)
    monkeypatch.setattr(prefill, "record_round_time", taken)
    with fake_time(engine, runs_ahead=runs_ahead) as clock:
        began = clock.now
        engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_new_tokens=250))
        passed = clock.now - began
    stats = engine.stats
    assert stats.steps > 50
    assert stats.seconds == pytest.approx(passed, rel=0.01)
    assert told["threads"] == pytest.approx(stats.decode_s, rel=0.01)
    if runs_ahead or not async_scheduling:  # else a CPU has done the next round before this one is read
        assert told["policy"] == pytest.approx(stats.decode_s, rel=0.05)
        assert told["prompts"] == pytest.approx(told["plain"], rel=0.05)
    assert mode != "naive" or told["prompts"] == pytest.approx(stats.decode_s, rel=0.01)
