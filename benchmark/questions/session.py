"""Measurement of the missing turns, in this process or in replicas."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, replace
from datetime import datetime
from itertools import product
from typing import Any, NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmark.arguments import rotated
from benchmark.questions import records, summary
from benchmark.questions.records import Key, TurnRecord
from benchmark.questions.run_config import RUN_FILE, RunConfig, require_same_machine
from benchmark.timed import generate
from multigpu.data_parallel import Numbered, TaskQueue, run_tasks, start
from multigpu.journal import Journal
from sharesd.cli.console import err_console, loading_bars, log_file, print_line, set_up_logging
from sharesd.config import Mode
from sharesd.llm import LLM
from sharesd.reports import environment
from sharesd.reports.questions import Question, prompt_format, prompt_ids, require_room
from sharesd.reports.tables import number, write_json
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 8  # decoded from the first prompt before anything is measured
WORK = "benchmark.questions.session:answer_tasks"
Done = Mapping[str, dict[Key, TurnRecord]]  # finished turns of each mode
State = dict[str, Any]  # contents of run.json


class Recorder:
    """Files, log and progress bars of a measurement, drawn between turns only."""

    def __init__(self, run: RunConfig, done: Done) -> None:
        self._run, self._done = run, done
        self._files, self._journals = ExitStack(), dict[str, Journal]()
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
        self._bars = Progress(
            TextColumn("[bold]{task.description}"),
            *columns,
            TimeRemainingColumn(),
            console=err_console,
            auto_refresh=False,
            transient=True,
        )
        self._tasks = {mode: self._bars.add_task(mode, total=len(run.keys), speed="") for mode in done}

    def __enter__(self) -> Recorder:
        if err_console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()
        self._files.close()

    def add(self, mode: str, record: TurnRecord) -> None:
        if mode not in self._journals:  # no file before the first turn
            self._journals[mode] = self._files.enter_context(records.journal(self._run.out_dir, mode))
        self._journals[mode].add(asdict(record))
        log.info(
            "%s run %d question %s turn %d: %d tokens, %d rounds, prefill %.3f s, decode %.3f s",
            *(mode, *record.key, record.new_tokens, record.rounds, record.prefill_s, record.decode_s),
        )
        if err_console.is_terminal:
            self._bars.update(self._tasks[mode], completed=len(self._done[mode]), speed=self._speed(mode), refresh=True)

    def end_question(self, run: int, index: int) -> None:
        """Print speeds of all turns so far, unless stderr is a terminal."""
        if not err_console.is_terminal:
            questions = self._run.questions.questions
            name = f"question {index + 1}/{len(questions)} {questions[index].category}"
            name = f"run {run}/{self._run.runs}, {name}" if self._run.runs > 1 else name
            speeds = "  ".join(f"{mode} {self._speed(mode)}" for mode in self._tasks)
            print_line(f"{name}; all so far: {speeds}", err_console)

    def _speed(self, mode: str) -> str:
        if not (turns := self._done[mode].values()):
            return ""
        found = summary.total(turns).to_dict()
        return f"{number(found['tokens_per_second'])} tok/s, tau {number(found['tau'], 2)}"


def measure_here(run: RunConfig, state: State | None, done: Done) -> tuple[State, bool]:
    """Measure turns missing in `done`; return the new state, True if interrupted."""
    announce(run)
    with loading_bars() as progress:
        llm = LLM.from_config(run.config, run.modes, reuse=False, progress=progress)
    runtime = llm.runtime
    if runtime.auto is not None:
        print_line(str(runtime.auto), err_console)
    _require_room(run, runtime)
    machine = environment.environment(str(runtime.device))
    if state is not None:
        require_same_machine(state["environment"], machine, run.out_dir)
    _warm_up(run, llm)
    state = state or {"format": environment.FORMAT, "settings": run.settings, "environment": machine, "sessions": []}
    session = _session(runtime)
    state["sessions"].append(session)
    run.out_dir.mkdir(parents=True, exist_ok=True)
    graphs_before, state_file = environment.num_compiled_graphs(), run.out_dir / RUN_FILE
    name = f"{run.settings['benchmark']}-{datetime.now():%Y%m%d-%H%M%S}.log"
    try:
        with log_file(run.log_dir / name) if run.log_dir else nullcontext(), Recorder(run, done) as recorder:
            log.info("%s", run.settings["command"])
            for number_, index in _order(run):
                question = run.questions.questions[index]
                for mode, record in measure_question(llm, number_, index, question, run.params, done):
                    recorder.add(mode, record)
                session |= _usage(runtime, graphs_before)
                write_json(state_file, state)
                recorder.end_question(number_, index)
    except KeyboardInterrupt:
        return state, True
    finally:
        runtime.close_trace()
        session |= _usage(runtime, graphs_before)
        write_json(state_file, state)
    return state, False


class Asked(NamedTuple):
    """Question with missing turns, and its finished turns by mode."""

    run: int
    number: int
    done: dict[str, dict[Key, TurnRecord]]


class Answered(NamedTuple):
    """New turns of a question from a replica, with process data."""

    process: int
    environment: dict[str, Any]
    session: dict[str, Any]
    turns: list[tuple[Mode, TurnRecord]]


def measure_on_replicas(run: RunConfig, state: State | None, done: Done) -> tuple[State | None, bool]:
    """Measure in replicas, each a session; state may be None if interrupted."""
    announce(run)
    questions, resumed, sessions = run.questions.questions, state, dict[int, dict[str, Any]]()
    asked = []
    for number_, index in _order(run):
        id_ = questions[index].id
        found = {mode: {key: r for key, r in each.items() if key[:2] == (number_, id_)} for mode, each in done.items()}
        if any(len(turns) < len(questions[index].turns) for turns in found.values()):
            asked.append(Asked(number_, index, found))
    run.out_dir.mkdir(parents=True, exist_ok=True)
    results = run_tasks(enumerate(asked), start(WORK, run, run.replicas), max_assigned=1)
    try:
        with Recorder(run, done) as recorder, closing(results):  # type: ignore[type-var]
            for task, answered in results:
                begun = {"format": environment.FORMAT, "settings": run.settings, "environment": answered.environment}
                state = state or {**begun, "sessions": []}
                if answered.process not in sessions:
                    if resumed is not None:
                        require_same_machine(resumed["environment"], answered.environment, run.out_dir)
                    state["sessions"].append(sessions.setdefault(answered.process, {}))
                sessions[answered.process].update(answered.session)
                write_json(run.out_dir / RUN_FILE, state)
                for mode, record in answered.turns:
                    done[mode][record.key] = record
                    recorder.add(mode, record)
                recorder.end_question(asked[task].run, asked[task].number)
    except KeyboardInterrupt:
        return state, True
    return state, False


def answer_tasks(run: RunConfig, tasks: TaskQueue) -> Iterator[Numbered]:
    """Load, warm up, and answer the tasks' questions, in a replica."""
    set_up_logging(os.environ.get("LOGLEVEL", "WARNING"))
    llm = LLM.from_config(run.config, run.modes, reuse=False)
    runtime = llm.runtime
    _require_room(run, runtime)
    machine = environment.environment(str(runtime.device))
    _warm_up(run, llm, quiet=True)
    session, graphs_before = _session(runtime), environment.num_compiled_graphs()
    while (task := tasks.take(wait=True)) is not None:
        number_, (repetition, index, done) = task
        question = run.questions.questions[index]
        turns = list(measure_question(llm, repetition, index, question, run.params, done))
        session |= _usage(runtime, graphs_before)
        yield number_, Answered(os.getpid(), machine, session, turns)


def measure_question(
    llm: LLM,
    run: int,
    index: int,
    question: Question,
    params: SamplingParams,
    done: Mapping[str, dict[Key, TurnRecord]],
) -> Iterator[tuple[Mode, TurnRecord]]:
    """Add and yield turns missing in `done`, by mode; the first mode rotates."""
    for mode in rotated(list(done), index + run - 1):
        answers: list[str] = []
        for turn in range(1, len(question.turns) + 1):
            key = (run, question.id, turn)
            if key not in done[mode]:
                prompt = prompt_ids(llm.tokenizer, question, answers)
                done[mode][key] = measure_turn(llm, mode, prompt, params, run=run, question=question, turn=turn)
                yield mode, done[mode][key]
            answers.append(done[mode][key].text)


def measure_turn(
    llm: LLM, mode: Mode, prompt: list[int], params: SamplingParams, *, run: int, question: Question, turn: int
) -> TurnRecord:
    llm.runtime.engine.label = {"run": run, "question_id": question.id, "turn": turn}
    [completion] = generate(llm, mode, [prompt], params)
    stats = completion.stats
    assert stats is not None
    accepted_by = Counter(name for name in completion.drafters if name is not None)
    numbers = {name: str(number) for number, name in enumerate(accepted_by)}
    assert completion.finish_reason is not None and stats.new_tokens == len(completion.token_ids)
    same = (*summary.COUNTS, "decode_s", "accepted_at", "reached_at")
    return TurnRecord(
        run=run,
        question_id=question.id,
        category=question.category,
        turn=turn,
        text=completion.text,
        token_ids=completion.token_ids,
        sources=dict(stats.sources),
        finish_reason=completion.finish_reason,
        accept_lengths=stats.accept_lengths[0],
        token_sources="".join(source[0] for source in completion.sources),
        accepted_by=dict(accepted_by),
        token_drafters="".join("-" if name is None else numbers[name] for name in completion.drafters),
        **{name: getattr(stats, name) for name in same},
    )


def announce(run: RunConfig) -> None:
    asked, runs = run.settings["questions"], f", {run.runs} runs" if run.runs > 1 else ""
    which = f"the first {asked['num_questions']} of {asked['num_available']} ({asked['num_turns']} turns{runs})"
    line = f"{run.settings['model']} in {', '.join(run.modes)}: {asked['label']}, {which}; --num-questions changes that"
    print_line(line, err_console)


def _order(run: RunConfig) -> Iterator[tuple[int, int]]:
    return product(range(1, run.runs + 1), range(len(run.questions.questions)))


def _require_room(run: RunConfig, runtime: Runtime) -> None:
    lengths = {"max_new_tokens": run.params.max_new_tokens, "max_context": runtime.max_context}
    require_room(runtime.tokenizer, run.questions.questions, **lengths)


def _warm_up(run: RunConfig, llm: LLM, *, quiet: bool = False) -> None:
    """Compile all shapes of each mode, and answer a prompt."""
    runtime, prompt = llm.runtime, prompt_ids(llm.tokenizer, run.questions.questions[0], [])
    short = replace(run.params, max_new_tokens=min(WARM_UP_TOKENS, run.params.max_new_tokens))
    for mode in run.modes:
        with nullcontext() if quiet else err_console.status(f"compiling and warming up {mode}"):
            runtime.warm_up(mode, run.params)
            llm.generate([prompt], short, mode=mode)
    if not quiet:
        warm = "  ".join(f"{mode} {runtime.report(mode).compile_seconds:.1f} s" for mode in run.modes)
        print_line(f"loaded in {runtime.load_seconds:.1f} s; warmed up: {warm}", err_console)


def _usage(runtime: Runtime, graphs_before: int) -> dict[str, Any]:
    return {
        "peak_memory_bytes": environment.peak_memory(str(runtime.device)),
        "recompiles": environment.num_compiled_graphs() - graphs_before,
        "load": environment.load_meter().read(),
    }


def _session(runtime: Runtime) -> dict[str, Any]:
    """Return the session entry of this process for run.json."""
    modes = {}
    for mode, loaded in runtime.engine.modes.items():
        report = runtime.report(mode)
        weights, kv = loaded.drafter.extra_bytes() if loaded.drafter else (0, 0)
        facts = {"extra_weight_bytes": weights, "extra_kv_bytes": kv, "compile_seconds": report.compile_seconds}
        modes[mode] = {**facts, "quantized": asdict(report.quant) if report.quant else None}
    return {
        "load_seconds": runtime.load_seconds,
        "weight_bytes": runtime.weight_bytes,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "ready_seconds": environment.seconds_since_start(),
        "settings": environment.resolved_settings(runtime),
        "architecture": runtime.target.name,
        "prompt_format": prompt_format(runtime.tokenizer),
        "auto": None if runtime.auto is None else str(runtime.auto),
        "kv_bytes": runtime.cache.nbytes,
        "modes": modes,
    }
