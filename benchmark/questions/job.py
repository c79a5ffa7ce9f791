"""What a command line asks to be measured, checked before anything is loaded or written."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmark import arguments
from benchmark.questions import questions as question_files
from benchmark.questions import records
from benchmark.questions.questions import Question, QuestionSet
from benchmark.questions.records import Key
from multigpu.device_assignment import environments
from sharesd.cli import options
from sharesd.config import HEADS, MODES, EngineConfig, Mode, SamplingParams

NUM_QUESTIONS = 16
"""Asked by default: a few minutes with the embedded model on two CPU cores."""
ALL = "all"
EMBEDDED = "SmolLM2-135M-Instruct (embedded)"
RUN_FILE = "run.json"
NAME_KEY = "sharesd_name"
"""Entry of config.json which says how reports call a checkpoint that ShareSD has written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One measurement."""

    modes: tuple[Mode, ...]
    config: EngineConfig
    params: SamplingParams
    questions: QuestionSet
    """Those that are asked."""
    runs: int
    out_dir: Path
    log_dir: Path | None
    resume: bool
    places: list[dict[str, str]]
    """The environments of replicas that share the questions; none where this process answers them all."""
    settings: dict[str, Any]
    """For the report, and to be compared on --resume; everything in it can be written as JSON."""

    @property
    def keys(self) -> list[Key]:
        """The turns that each mode is measured on."""
        return [
            (run, question.id, turn)
            for run in range(1, self.runs + 1)
            for question in self.questions.questions
            for turn in range(1, len(question.turns) + 1)
        ]


def job_of(args: argparse.Namespace) -> Job:
    """The job of parsed arguments; ValueError for whatever is wrong with them."""
    modes = options.modes_of(args, default=MODES)
    config = options.engine_config(args, modes=modes)
    params = options.sampling_params(args)
    found = question_files.load(args.benchmark, args.questions)
    num_available = len(found.questions)
    asked = getattr(args, "num_questions", NUM_QUESTIONS)
    if asked is not None and asked > num_available and hasattr(args, "num_questions"):
        raise ValueError(f"--num-questions is {asked}, but {found.label} holds {num_available}; ask for no more")
    chosen = found.questions[:asked]
    drafting = sorted({*HEADS} & {*config.drafters_of(*modes)})
    settings = {
        "benchmark": args.benchmark,
        "command": arguments.command(),
        "model": model_name(config.target),
        "target": config.target,
        "draft": config.draft,
        "head": ", ".join(config.heads) or next(("shipped" for mode in drafting if config.head_of(mode)), None),
        "head_quant": config.head_quant and str(config.head_quant),
        "modes": list(modes),
        "questions": {
            "label": found.label,
            "source": found.source,
            "num_questions": len(chosen),
            "num_available": num_available,
            "num_turns": sum(len(question.turns) for question in chosen),
            "sha256": _fingerprint(chosen),
        },
        "runs": args.runs,
        "replicas": args.replicas,
        "dtype": config.dtype,
        "device": config.device,
        "quant": str(config.quant),
        "compile": config.compile,
        "num_draft": config.num_draft or "auto",
        "max_draft": config.most_draft,
        "tree": config.tree if isinstance(config.tree, str) else ":".join(map(str, config.tree)),
        "hybrid_with": list(config.drafters_of("hybrid")),
        "ngram": [config.ngram_min, config.ngram_max, config.ngram_recent],
        "corpus": config.corpus_file.name if config.corpus_file else "empty",
        "recycle_table": config.table_file.name if config.table_file else "empty",
        "exact": config.exact,
        "steady_cublas": config.steady_cublas,
        "max_context": config.max_context,
        "sampling": {**asdict(params), "stop": list(params.stop), "stop_token_ids": [], "logit_bias": {}},
    }
    return Job(
        modes=modes,
        config=config,
        params=params,
        questions=replace(found, questions=chosen),
        runs=args.runs,
        out_dir=_out_dir(args),
        log_dir=None if args.log_dir is None else _writable(Path(args.log_dir), "--log-dir"),
        resume=args.resume,
        places=[] if args.replicas is None else environments(args.replicas, config.device),
        settings=settings,
    )


def model_name(target: str | None) -> str:
    """How reports call a target: the name in its config.json where ShareSD wrote one, else that of folder or hub id."""
    if target is None:
        return EMBEDDED
    file = Path(target).expanduser() / "config.json"
    if file.is_file():
        try:
            name = json.loads(file.read_text(encoding="utf-8")).get(NAME_KEY)
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{file} cannot be read as JSON ({error}); download the checkpoint again") from error
        if name is not None:
            return str(name)
    return Path(target).name or target


def previous_state(job: Job) -> dict[str, Any]:
    """What run.json of an interrupted measurement holds; ValueError unless it was this very measurement."""
    file = job.out_dir / RUN_FILE
    state = records.read_json(file)
    if {"settings", "environment", "sessions"} - state.keys():
        raise ValueError(f"{file} is not the file of a measurement; use another --out-dir")
    require_same(state["settings"], {**job.settings, "command": state["settings"].get("command")}, job.out_dir)
    return state


def require_same(old: dict[str, Any], new: dict[str, Any], out_dir: Path) -> None:
    """ValueError naming the first thing that differs from what was measured before."""
    difference = records.first_difference(old, new)
    if difference:
        name, before, now = difference
        raise ValueError(
            f"--resume: {name} was {before!r} in {out_dir} and is {now!r} now; give the same, or another --out-dir"
        )


def _out_dir(args: argparse.Namespace) -> Path:
    if args.out_dir is None:
        if args.resume:
            raise ValueError("--resume needs --out-dir, the folder of the interrupted measurement")
        return _writable(Path("results") / f"{args.benchmark}-{datetime.now():%Y%m%d-%H%M%S}", "--out-dir")
    out_dir = _writable(Path(args.out_dir), "--out-dir")
    ours = [RUN_FILE, "summary.json", "report.md", *(records.answers_file(out_dir, mode).name for mode in MODES)]
    found = next((name for name in ours if (out_dir / name).exists()), None)
    if found and not args.resume:
        raise ValueError(f"--out-dir {out_dir} holds {found} already; add --resume to continue, or name another folder")
    return out_dir


def _writable(folder: Path, flag: str) -> Path:
    """The folder, if it can be written or made."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"{flag} is {folder}, but {nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} is {folder}, but {nearest} cannot be written; name another folder")
    return folder


def _fingerprint(questions: tuple[Question, ...]) -> str:
    return hashlib.sha256(json.dumps([[q.id, q.turns] for q in questions]).encode()).hexdigest()[:16]
