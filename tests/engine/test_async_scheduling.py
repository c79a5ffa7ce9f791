"""Rounds that are launched before the one in front of them has been read: texts are those of plain decoding, whatever
is drafted, whoever joins, leaves or is cancelled.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sharesd.engine.decode_variant import DecodeVariant
from sharesd.engine.engine import Engine
from sharesd.engine.output_processor import OutputProcessor
from sharesd.engine.outputs import Completion
from sharesd.engine.round_launcher import RoundLauncher
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_policy import Policy
from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape, DraftTree
from tests.drafters.test_eagle import TREE, built, head_for
from tests.engine import test_grammar
from tests.engine.test_rows import MODEL, REQUESTS, alone, check_load, new
from tests.helpers.oracle import new_engine

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 64
HEADS = ("eagle", "eagle3", "parallel", "glide")
STOPS = SamplingParams(max_new_tokens=24, stop=("ab", "er."), temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def wanted() -> list[Completion]:
    return alone(REQUESTS[:COUNT])


def launched_ahead(mode: str, folder: Path, *, batch: int = 3, async_scheduling: bool = True, **options: Any) -> Engine:
    kind, _, tree = mode.partition(" ")
    options |= {"batch": batch, "async_scheduling": async_scheduling, "auto_length": True}
    if kind not in HEADS:
        return new(kind, **({"tree": TREE} if tree else {}), **options)
    return built(head_for(MODEL, folder, kind), MODEL, tree=TREE if tree else None, **options)


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
        return dice.choice(
            [NO_DRAFT, *self.policy.shapes, self.policy.shapes[-1]] if dice.random() < 0.7 else [NO_DRAFT]
        )

    monkeypatch.setattr(DecodeVariant, "shape", some_shape)


@pytest.mark.parametrize("mode", ["naive", "share", "classic", "share tree", *HEADS])
def test_a_load_of_requests_gives_each_what_it_gets_alone(
    mode: str, wanted: list[Completion], launches: list[bool], any_draft: None, tmp_path: Path
) -> None:
    engine = launched_ahead(mode, tmp_path, prefill_chunk=16)
    assert engine.async_scheduling
    check_load(mode, engine, wanted)
    assert sum(launches) > len(launches) / (3 if mode.startswith("classic") else 1.5)


@pytest.mark.parametrize("mode", ["share", "classic", "classic tree", *HEADS, "eagle tree", "glide tree"])
def test_drafts_are_those_that_come_one_by_one(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After plain rounds, few and many, too: what the host does not know yet, the device does."""
    found = []
    for async_scheduling in (False, True):
        dice, drafts = random.Random(7), list[Any]()
        engine = launched_ahead(mode, tmp_path / str(async_scheduling), batch=1, async_scheduling=async_scheduling)
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


@pytest.mark.parametrize("mode", ["naive", "share", "classic", *HEADS])
def test_texts_end_at_stop_strings(mode: str, any_draft: None, tmp_path: Path) -> None:
    prompts = [[3, 17, 9], [21, 4, 4, 30], [5], [8, 9, 10, 11], [1, 2]]
    want = new_engine(MODEL, batch=3).generate(prompts, STOPS)
    found = launched_ahead(mode, tmp_path).generate(prompts, STOPS)
    assert [(one.text, one.token_ids, one.finish_reason) for one in found] == [
        (one.text, one.token_ids, one.finish_reason) for one in want
    ]
    assert {one.finish_reason for one in want} == {"stop", "length"}


@pytest.mark.parametrize("mode", ["suffix", "hybrid", "hybrid classic", "ngram+recycle"])
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


@pytest.mark.parametrize("mode", ["suffix", "ngram+recycle", "hybrid", "hybrid classic", "eagle3", "glide"])
def test_rounds_go_ahead_while_tables_pause(
    mode: str, wanted: list[Completion], launches: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are asked every third round; a second model would have to read what the host does not know."""
    dice = random.Random(9)
    monkeypatch.setattr(Policy, "tables_pause", property(lambda self: self.gate.pauses(True)))
    monkeypatch.setattr(Policy, "should_query_tables", lambda self: self.gate.opens(True))
    monkeypatch.setattr(Policy, "next_shape", lambda self, **_: dice.choice([NO_DRAFT, *self.shapes]))
    options: dict[str, Any] = {"batch": 3, "async_scheduling": True, "auto_length": True, "prefill_chunk": 16}
    if mode in HEADS:
        engine = built(head_for(MODEL, tmp_path, mode), MODEL, mixed=True, **options)
    else:
        engine = new(mode, **options)
    assert not engine.async_scheduling and engine.options.async_scheduling
    check_load(mode, engine, wanted)
    assert (sum(launches) > len(launches) / 4) == (mode != "hybrid classic")


@pytest.mark.parametrize("mode", ["share", "share tree", "hybrid"])
def test_rounds_with_grammars_wait_for_what_comes_out(mode: str, launches: list[bool]) -> None:
    """And go ahead again once these have ended."""
    requests = test_grammar.REQUESTS[:12]
    requests.append(([1, 2], SamplingParams(max_new_tokens=80)))
    want = [test_grammar.answers(test_grammar.new("naive", batch=1), [request])[0] for request in requests]
    found = test_grammar.answers(test_grammar.new(mode, async_scheduling=True), requests)
    assert [(one.token_ids, one.text, one.finish_reason) for one in found] == [
        (one.token_ids, one.text, one.finish_reason) for one in want
    ]
    assert (0 < sum(launches) < len(launches)) == (mode != "hybrid")
