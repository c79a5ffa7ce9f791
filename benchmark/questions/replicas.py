"""A measurement by several processes, which take the questions from one queue."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

from benchmark import environment
from benchmark.questions import records
from benchmark.questions.conversation import require_room
from benchmark.questions.display import Display
from benchmark.questions.job import RUN_FILE, Job
from benchmark.questions.measure import measure_question
from benchmark.questions.questions import Question
from benchmark.questions.records import Key, TurnRecord
from benchmark.questions.session import announce, require_same_machine, session_facts, warm_engines
from multigpu.data_parallel import Numbered, Tasks, spread, start
from sharesd.cli.console import set_up_logging
from sharesd.runtime import Runtime

WORK = "benchmark.questions.replicas:answer"


class Asked(NamedTuple):
    """A question that lacks answers."""

    run: int
    place: int
    done: dict[str, dict[Key, TurnRecord]]
    """Its answers that are there, by mode."""


class Answered(NamedTuple):
    """What came of it."""

    process: int
    environment: dict[str, Any]
    session: dict[str, Any]
    """The facts of the process, as of now."""
    turns: list[tuple[str, TurnRecord]]
    """Modes and their new answers."""


def measure_on_replicas(
    job: Job, state: dict[str, Any] | None, done: Mapping[str, dict[Key, TurnRecord]]
) -> tuple[dict[str, Any] | None, bool]:
    """As `measure_session`, but each of the job's replicas is a session; the state may still be None where the user
    has interrupted before any answer.

    The processes run at the same time: on a GPU of its own each is as fast as alone, on one CPU it is not.
    """
    announce(job)
    questions, resumed, sessions = job.questions.questions, state, dict[int, dict[str, Any]]()
    asked = [
        Asked(run, index, {mode: _of(found, run, question) for mode, found in done.items()})
        for run in range(1, job.runs + 1)
        for index, question in enumerate(questions)
    ]
    asked = [one for one in asked if any(len(of) < len(questions[one.place].turns) for of in one.done.values())]
    display = Display(done, num_questions=len(questions), num_turns=len(job.keys), runs=job.runs)
    job.out_dir.mkdir(parents=True, exist_ok=True)
    results = spread(enumerate(asked), start(WORK, job, job.places), at_once=1)
    try:
        with display, closing(results):  # type: ignore[type-var]
            for number, answered in results:
                state = state or {"settings": job.settings, "environment": answered.environment, "sessions": []}
                if answered.process not in sessions:
                    if resumed is not None:
                        require_same_machine(resumed["environment"], answered.environment, job.out_dir)
                    state["sessions"].append(sessions.setdefault(answered.process, {}))
                sessions[answered.process].update(answered.session)
                records.write_json(job.out_dir / RUN_FILE, state)
                for mode, record in answered.turns:
                    records.append(job.out_dir, mode, record)
                    done[mode][record.key] = record
                    display.finished(mode)
                display.answered(asked[number].run, asked[number].place, questions[asked[number].place])
    except KeyboardInterrupt:
        return state, True
    return state, False


def answer(job: Job, tasks: Tasks) -> Iterator[Numbered]:
    """What a replica does: load, warm up, and answer the questions that are the tasks."""
    set_up_logging(os.environ.get("LOGLEVEL", "WARNING"))
    runtime = Runtime(job.config, job.modes)
    questions, device = job.questions.questions, str(runtime.device)
    require_room(
        runtime.tokenizer, questions, max_new_tokens=job.params.max_new_tokens, max_context=runtime.max_context
    )
    machine, engines = environment.environment(device), warm_engines(job, runtime, quiet=True)
    facts, graphs_before = session_facts(runtime, engines), environment.num_compiled_graphs()
    while (task := tasks.take(wait=True)) is not None:
        number, (run, index, done) = task
        turns = _Turns()
        measure_question(engines, run, index, questions[index], job.params, done=done, watcher=turns)
        facts["peak_memory_bytes"] = environment.peak_memory(device)
        facts["recompiles"] = environment.num_compiled_graphs() - graphs_before
        yield number, Answered(os.getpid(), machine, facts, turns.new)


class _Turns:
    """A watcher that collects."""

    def __init__(self) -> None:
        self.new: list[tuple[str, TurnRecord]] = []

    def starts(self, mode: str, run: int, index: int, question: Question, turn: int) -> None:
        """Nothing is shown."""

    def finished(self, mode: str, record: TurnRecord) -> None:
        self.new.append((mode, record))

    def answered(self, run: int, index: int, question: Question) -> None:
        """The result says so."""


def _of(found: Mapping[Key, TurnRecord], run: int, question: Question) -> dict[Key, TurnRecord]:
    return {key: record for key, record in found.items() if key[:2] == (run, question.id)}
