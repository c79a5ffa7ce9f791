"""The measuring loop: every question is answered by all modes right after each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from benchmark.questions.conversation import prompt_ids
from benchmark.questions.questions import Question
from benchmark.questions.records import Key, TurnRecord
from benchmark.timed import generate
from sharesd.config import Mode, SamplingParams
from sharesd.engine.engine import Engine


class Watcher(Protocol):
    """Hears what the loop does, between the turns and never during one."""

    def starts(self, mode: str, run: int, index: int, question: Question, turn: int) -> None:
        """A turn is about to be measured; `index` counts the questions from 0."""
        ...

    def finished(self, mode: str, record: TurnRecord) -> None:
        """A turn was measured."""
        ...

    def answered(self, run: int, index: int, question: Question) -> None:
        """All modes have answered a question."""
        ...


def measure(
    engines: Mapping[Mode, Engine],
    questions: Sequence[Question],
    params: SamplingParams,
    *,
    runs: int,
    done: Mapping[str, dict[Key, TurnRecord]],
    watcher: Watcher,
) -> None:
    """Measure all turns that `done` lacks, and put them there.

    The modes take turns question by question, each time in another order: what the machine does besides hits all alike.
    """
    for run in range(1, runs + 1):
        for index, question in enumerate(questions):
            measure_question(engines, run, index, question, params, done=done, watcher=watcher)


def measure_question(
    engines: Mapping[Mode, Engine],
    run: int,
    index: int,
    question: Question,
    params: SamplingParams,
    *,
    done: Mapping[str, dict[Key, TurnRecord]],
    watcher: Watcher,
) -> None:
    """The turns of one question that `done` lacks."""
    for mode in _rotated(list(engines), index + run - 1):
        _answer(mode, engines[mode], run, index, question, params, done[mode], watcher)
    watcher.answered(run, index, question)


def _answer(
    mode: Mode,
    engine: Engine,
    run: int,
    index: int,
    question: Question,
    params: SamplingParams,
    done: dict[Key, TurnRecord],
    watcher: Watcher,
) -> None:
    """One conversation; each turn's prompt holds the answers that this mode gave before."""
    answers: list[str] = []
    for turn in range(1, len(question.turns) + 1):
        key = (run, question.id, turn)
        if key not in done:
            watcher.starts(mode, run, index, question, turn)
            prompt = prompt_ids(engine.tokenizer, question, answers)
            done[key] = measure_turn(engine, prompt, params, run=run, question=question, turn=turn)
            watcher.finished(mode, done[key])
        answers.append(done[key].text)


def measure_turn(
    engine: Engine, prompt: list[int], params: SamplingParams, *, run: int, question: Question, turn: int
) -> TurnRecord:
    """Decode one answer from an empty cache."""
    [completion] = generate(engine, [prompt], params)
    stats = engine.stats
    accepted_by = Counter(name for name in completion.drafters if name is not None)
    places = {name: str(place) for place, name in enumerate(accepted_by)}
    assert completion.finish_reason is not None and stats.new_tokens == len(completion.token_ids)
    return TurnRecord(
        run=run,
        question_id=question.id,
        category=question.category,
        turn=turn,
        text=completion.text,
        token_ids=completion.token_ids,
        sources=dict(stats.sources),
        prompt_tokens=stats.prompt_tokens,
        new_tokens=stats.new_tokens,
        decoded_tokens=stats.decoded_tokens,
        finish_reason=completion.finish_reason,
        prefill_s=stats.prefill_s,
        decode_s=stats.decode_s,
        draft_s=stats.draft_s,
        verify_s=stats.verify_s,
        overhead_s=stats.overhead_s,
        rounds=stats.rounds,
        accepted_at=stats.accepted_at,
        accept_lengths=stats.accept_lengths[0],
        drafted_tokens=stats.drafted_tokens,
        draft_steps=stats.draft_steps,
        token_sources="".join(source[0] for source in completion.sources),
        accepted_by=dict(accepted_by),
        token_drafters="".join("-" if name is None else places[name] for name in completion.drafters),
    )


def _rotated(modes: list[Mode], by: int) -> list[Mode]:
    by %= len(modes)
    return modes[by:] + modes[:by]
