"""Configuration of a measurement, validated before models are loaded."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from dataclasses import asdict, astuple, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmark import arguments
from benchmark.questions import records
from benchmark.questions.records import Key
from multigpu.data_parallel import environments
from sharesd.cli import options
from sharesd.cli.console import loading_bars
from sharesd.config import EngineConfig, Mode
from sharesd.drafters import registry, selection
from sharesd.reports import questions as question_files
from sharesd.reports.environment import IDENTITY, files_of, load_meter, settings_of
from sharesd.reports.questions import QuestionSet
from sharesd.reports.tables import differing, flat, read_json
from sharesd.sampling_params import SamplingParams

NUM_QUESTIONS = 16  # default; a few minutes with the embedded model on two CPU cores
ALL = "all"
RUN_FILE = "run.json"  # holds the settings, the environment, and an entry per session (a process that measured)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Configuration of one measurement."""

    modes: tuple[Mode, ...]
    config: EngineConfig
    params: SamplingParams
    questions: QuestionSet  # those that are asked
    runs: int
    out_dir: Path
    log_dir: Path | None
    resume: bool
    replicas: list[dict[str, str]]  # environment variables of each; empty if this process answers all questions
    settings: dict[str, Any]  # settings for the report, compared on --resume; JSON values only

    @property
    def keys(self) -> list[Key]:
        """Keys of all turns to measure, for each mode."""
        return [
            (run, question.id, turn)
            for run in range(1, self.runs + 1)
            for question in self.questions.questions
            for turn in range(1, len(question.turns) + 1)
        ]


def add_question_options(group: Any, source: str) -> None:
    """Add the options of benchmarks on all turns of questions."""
    group.add_argument("--questions", metavar="FILE", help=f"JSON Lines, gzipped or not (default: {source})")
    text = f"the first N questions, or {ALL} (default: {NUM_QUESTIONS})"
    group.add_argument("--num-questions", type=_number, default=argparse.SUPPRESS, metavar="N", help=text)


def _number(text: str) -> int | None:
    return None if text == ALL else arguments.number(text)


def chosen_questions(args: argparse.Namespace, found: QuestionSet) -> tuple[QuestionSet, dict[str, Any]]:
    """Return first questions and their settings; ValueError for too many."""
    num_available, asked = len(found.questions), getattr(args, "num_questions", NUM_QUESTIONS)
    if asked is not None and asked > num_available and hasattr(args, "num_questions"):
        raise ValueError(f"--num-questions is {asked}, but {found.label} has only {num_available}; lower it")
    chosen = found.questions[:asked]
    texts = json.dumps([[question.id, question.turns] for question in chosen])
    about = {"label": found.label, "source": found.source, "num_questions": len(chosen), "num_available": num_available}
    about["num_turns"] = sum(len(question.turns) for question in chosen)
    about["sha256"] = hashlib.sha256(texts.encode()).hexdigest()[:16]
    return replace(found, questions=chosen), about


def run_config(args: argparse.Namespace) -> RunConfig:
    """Return the configuration of parsed arguments; ValueError for invalid ones."""
    load_meter()
    modes = options.modes_of(args, default=registry.modes())
    config = options.engine_config(args, modes=modes)
    params = options.sampling_params(args)
    questions, about_them = chosen_questions(args, question_files.load(args.benchmark, args.questions))
    drafting = sorted({*registry.names("head")} & {*selection.active_drafters(config, *modes)})
    settings = {
        "benchmark": args.benchmark,
        **settings_of(config),
        "head": ", ".join(config.heads)
        or next(("shipped" for mode in drafting if selection.head_of(config, mode)), None),
        "head_quant": config.head_quant and str(config.head_quant),
        "modes": list(modes),
        "questions": about_them,
        **{name: getattr(args, name) for name in ("runs", "replicas")},
        "tree": config.tree if isinstance(config.tree, str) else ":".join(map(str, config.tree)),
        "ngram": list(astuple(selection.options_of(config, "ngram"))),
        **{name: getattr(config, name) for name in ("target", "exact", "steady_cublas", "max_context")},
        "sampling": {**asdict(params), "stop": list(params.stop), "stop_token_ids": [], "logit_bias": {}},
    }
    out_dir = _out_dir(args)
    log_dir = None if args.log_dir is None else _writable(Path(args.log_dir), "--log-dir")
    with loading_bars() as progress:
        settings["files"] = files_of(config, modes, progress=progress, questions=args.questions)
    return RunConfig(
        modes=modes,
        config=config,
        params=params,
        questions=questions,
        runs=args.runs,
        out_dir=out_dir,
        log_dir=log_dir,
        resume=args.resume,
        replicas=[] if args.replicas is None else environments(args.replicas, config.device),
        settings=settings,
    )


def previous_state(run: RunConfig) -> dict[str, Any]:
    """Return run.json of a measurement, with modes added; ValueError if settings differ."""
    file = run.out_dir / RUN_FILE
    state = read_json(file)
    if {"settings", "environment", "sessions"} - state.keys():
        raise ValueError(f"{file} was not written by a measurement; use another --out-dir")
    old, new = state["settings"], {**run.settings}
    new |= {name: old.get(name) for name in ("command", "head")}  # the hashes of heads are compared
    if {*run.modes} > {*old["modes"]}:
        new |= {"modes": old["modes"], "files": {name: run.settings["files"].get(name) for name in old["files"]}}
    _require_same(old, new, run.out_dir)
    old |= {name: run.settings[name] for name in ("modes", "files", "head")}
    return state


def require_same_machine(old: dict[str, Any], new: dict[str, Any], out_dir: Path) -> None:
    """Raise ValueError if the resumed measurement ran on another machine."""
    before, now = ({name: machine.get(name) for name in IDENTITY} for machine in (old, new))
    _require_same(before, now, out_dir)


def _require_same(old: dict[str, Any], new: dict[str, Any], out_dir: Path) -> None:
    for name, (before, now) in differing([flat(old), flat(new)]).items():
        raise ValueError(
            f"--resume: {name} was {before!r} in {out_dir} and is {now!r} now; use the same, or another --out-dir"
        )


def _out_dir(args: argparse.Namespace) -> Path:
    if args.out_dir is None:
        if args.resume:
            raise ValueError("--resume needs --out-dir, the folder of the interrupted measurement")
        return _writable(Path("results") / f"{args.benchmark}-{datetime.now():%Y%m%d-%H%M%S}", "--out-dir")
    out_dir = _writable(Path(args.out_dir), "--out-dir")
    answers = [records.answers_file(out_dir, mode).name for mode in registry.modes()]
    ours = [RUN_FILE, "summary.json", "report.md", *answers]
    found = next((name for name in ours if (out_dir / name).exists()), None)
    if found and not args.resume:
        raise ValueError(f"--out-dir {out_dir} already has {found}; add --resume to continue, or use another folder")
    return out_dir


def _writable(folder: Path, flag: str) -> Path:
    """Return the folder; ValueError if it cannot be written or created."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"{flag} is {folder}, but {nearest} is a file; use a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} is {folder}, but {nearest} is not writable; use another folder")
    return folder
