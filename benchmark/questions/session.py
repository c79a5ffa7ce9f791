"""One process's part of a measurement: load, warm up, measure what is missing, keep what is finished."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmark import environment
from benchmark.questions import records
from benchmark.questions.conversation import prompt_format, prompt_ids, require_room
from benchmark.questions.display import Display
from benchmark.questions.job import RUN_FILE, Job, require_same
from benchmark.questions.measure import measure
from benchmark.questions.questions import Question
from benchmark.questions.records import Key, TurnRecord
from sharesd.cli.console import err_console, loading_bars, log_file
from sharesd.config import Mode
from sharesd.engine.engine import Engine
from sharesd.runtime import Runtime

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
"""Decoded from the first prompt before anything is measured."""


def measure_session(
    job: Job, state: dict[str, Any] | None, done: Mapping[str, dict[Key, TurnRecord]]
) -> tuple[dict[str, Any], bool]:
    """Measure the turns that `done` lacks and add them; `state` is that of run.json, None for a new measurement.

    Returns the new state and whether the user interrupted. Nothing is written before all is loaded and warmed up.
    """
    announce(job)
    with loading_bars() as progress:
        runtime = Runtime(job.config, job.modes, progress=progress)
    if runtime.auto is not None:
        err_console.print(str(runtime.auto), highlight=False, markup=False, soft_wrap=True)
    questions = job.questions.questions
    require_room(
        runtime.tokenizer, questions, max_new_tokens=job.params.max_new_tokens, max_context=runtime.max_context
    )
    machine = environment.environment(str(runtime.device))
    if state is not None:
        require_same_machine(state["environment"], machine, job.out_dir)
    engines = warm_engines(job, runtime)
    state = state or {"settings": job.settings, "environment": machine, "sessions": []}
    recorder = _Recorder(job, runtime, engines, state, done)
    name = f"{job.settings['benchmark']}-{datetime.now():%Y%m%d-%H%M%S}.log"
    logging_to = log_file(job.log_dir / name) if job.log_dir else nullcontext()
    try:
        with logging_to, recorder.display:
            log.info("%s", job.settings["command"])
            log.info("session: %s", recorder.session)
            measure(engines, questions, job.params, runs=job.runs, done=done, watcher=recorder)
    except KeyboardInterrupt:
        return state, True
    finally:
        recorder.save()
    return state, False


class _Recorder:
    """The watcher of a session: files, log and display."""

    def __init__(
        self,
        job: Job,
        runtime: Runtime,
        engines: Mapping[Mode, Engine],
        state: dict[str, Any],
        done: Mapping[str, dict[Key, TurnRecord]],
    ) -> None:
        self._out_dir, self._state, self._device = job.out_dir, state, str(runtime.device)
        self._graphs_before = environment.num_compiled_graphs()
        self.session = session_facts(runtime, engines)
        self.display = Display(done, num_questions=len(job.questions.questions), num_turns=len(job.keys), runs=job.runs)
        state["sessions"].append(self.session)
        job.out_dir.mkdir(parents=True, exist_ok=True)
        self.save()

    def save(self) -> None:
        """Bring run.json up to date."""
        self.session["peak_memory_bytes"] = environment.peak_memory(self._device)
        self.session["recompiles"] = environment.num_compiled_graphs() - self._graphs_before
        records.write_json(self._out_dir / RUN_FILE, self._state)

    def starts(self, mode: str, run: int, index: int, question: Question, turn: int) -> None:
        self.display.starts(mode, run, index, question, turn)

    def finished(self, mode: str, record: TurnRecord) -> None:
        records.append(self._out_dir, mode, record)
        log.info(
            "%s run %d question %s turn %d: %d tokens, %d rounds, prefill %.3f s, decode %.3f s",
            *(mode, *record.key, record.new_tokens, record.rounds, record.prefill_s, record.decode_s),
        )
        self.display.finished(mode)

    def answered(self, run: int, index: int, question: Question) -> None:
        self.save()
        self.display.answered(run, index, question)


def announce(job: Job) -> None:
    """Say what is measured."""
    questions = job.settings["questions"]
    runs = f", {job.runs} runs" if job.runs > 1 else ""
    err_console.print(
        f"{job.settings['model']} in {', '.join(job.modes)}: {questions['label']}, the first "
        f"{questions['num_questions']} of {questions['num_available']} ({questions['num_turns']} turns{runs}); "
        "--num-questions takes another number, or all",
        highlight=False,
        soft_wrap=True,
    )


def warm_engines(job: Job, runtime: Runtime, *, quiet: bool = False) -> dict[Mode, Engine]:
    """Engines that have seen every shape: compiled by the runtime, and one real prompt each."""
    engines: dict[Mode, Engine] = {}
    prompt = prompt_ids(runtime.tokenizer, job.questions.questions[0], [])
    short = replace(job.params, max_new_tokens=min(WARM_UP_TOKENS, job.params.max_new_tokens))
    for mode in job.modes:
        with nullcontext() if quiet else err_console.status(f"compiling and warming up {mode}"):
            engines[mode] = runtime.engine(mode, warm=job.params)
            engines[mode].generate([prompt], short)
    if quiet:
        return engines
    compiled = "  ".join(f"{mode} {runtime.report(mode).compile_seconds:.1f} s" for mode in engines)
    err_console.print(f"loaded in {runtime.load_seconds:.1f} s; warmed up: {compiled}", highlight=False, soft_wrap=True)
    return engines


def session_facts(runtime: Runtime, engines: Mapping[Mode, Engine]) -> dict[str, Any]:
    """The facts of this process."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "ready_seconds": environment.seconds_since_start(),
        "load_seconds": runtime.load_seconds,
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "device": str(runtime.device),
        "architecture": runtime.target.name,
        "compile": runtime.compile,
        "prompt_format": prompt_format(runtime.tokenizer),
        "max_context": runtime.max_context,
        "auto": None if runtime.auto is None else str(runtime.auto),
        "weight_bytes": runtime.weight_bytes,
        "kv_bytes": runtime.cache.nbytes,
        "modes": {mode: _mode_facts(runtime, mode, engine) for mode, engine in engines.items()},
    }


def _mode_facts(runtime: Runtime, mode: Mode, engine: Engine) -> dict[str, Any]:
    report, drafter = runtime.report(mode), engine.drafter
    weights, kv = drafter.extra_bytes() if drafter else (0, 0)
    return {
        "compile_seconds": report.compile_seconds,
        "extra_weight_bytes": weights,
        "extra_kv_bytes": kv,
        "quantized": asdict(report.quant) if report.quant else None,
    }


def require_same_machine(old: dict[str, Any], new: dict[str, Any], out_dir: Path) -> None:
    """ValueError where a measurement that is resumed ran on another machine."""
    before, now = ({name: machine.get(name) for name in environment.IDENTITY} for machine in (old, new))
    require_same(before, now, out_dir)
