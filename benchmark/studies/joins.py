"""`joins`: by how much does a long prompt that joins lengthen the gaps between others' tokens?

Rows are decoded by `Engine.add` and `step`, as in a server. Once they have gone on for a while, a long prompt joins.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from benchmark import arguments
from benchmark.arguments import rich_table
from benchmark.questions import questions as question_files
from benchmark.questions.job import model_name
from benchmark.questions.records import write_json
from sharesd.cli import options
from sharesd.cli.console import console, err_console
from sharesd.config import MODES, Mode, SamplingParams
from sharesd.engine.engine import Engine

NUM_ROWS, PROMPT_TOKENS, RUNS = 4, 1500, 5
STEPS_BEFORE, SETTLING = 60, 20
"""Steps of the engine before the prompt joins, and those of them whose gaps are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """Of one run: gaps in seconds between chunks of a row, and how long the prompt took."""

    before: list[float]
    during: list[float]
    alone_s: float
    """Seconds until the prompt's first token, with nobody else."""
    joining_s: float
    """The same beside the rows."""

    def during_over_median(self, share: float) -> float:
        """A percentile of the gaps while the prompt was read, over the median of those before."""
        return sorted(self.during)[min(len(self.during) - 1, int(share * len(self.during)))] / median(self.before)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "joins",
        help="by how much does a long prompt that joins lengthen the gaps between others' tokens?",
        description="Decode some rows, let a long prompt join them, and compare the gaps between their tokens.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("joins")
    group.add_argument("--mode", choices=MODES, default="hybrid", help="what is measured")
    group.add_argument("--rows", type=arguments.number, default=NUM_ROWS, metavar="N", help="rows that are decoded")
    group.add_argument(
        "--prompt-tokens", type=arguments.number, default=PROMPT_TOKENS, metavar="M", help="length of the prompt"
    )
    group.add_argument("--questions", metavar="FILE", help="JSON Lines, perhaps gzipped (default: ShareSD's own)")
    group.add_argument("--runs", type=arguments.number, default=RUNS, metavar="R", help="of which medians are taken")
    arguments.add_out_dir(group, "joins")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write joins.json; returns 0."""
    mode: Mode = args.mode
    config = options.engine_config(args, modes=(mode,))
    config = replace(config, max_batch=args.rows + 1, max_context=config.planned_context)
    if args.prompt_tokens >= config.planned_context:
        raise ValueError(
            f"--prompt-tokens is {args.prompt_tokens} and the context holds {config.max_context}; raise --max-context"
        )
    found = question_files.load("mtbench", args.questions, None)
    out_dir = arguments.out_folder(args.out_dir, "joins")

    from sharesd.runtime import Runtime

    with err_console.status("loading"):
        runtime = Runtime(config, (mode,))
        engine = runtime.engine(mode, warm=SamplingParams())
    asked = [runtime.tokenizer.ask(question.turns[0]) for question in found.questions]
    tokens = [token for ids in asked for token in ids]
    prompt = (tokens * (1 + args.prompt_tokens // len(tokens)))[: args.prompt_tokens]
    with err_console.status("measuring"):
        joins = [measure(engine, [asked[i % len(asked)] for i in range(args.rows)], prompt) for _ in range(args.runs)]
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    figures = {name: median(join.during_over_median(share) for join in joins) for name, share in shares.items()}
    figures["alone_s"], figures["joining_s"] = (
        median(getattr(join, name) for join in joins) for name in ("alone_s", "joining_s")
    )
    settings = {
        "command": arguments.command(),
        "model": model_name(config.target),
        "mode": mode,
        "rows": args.rows,
        "prompt_tokens": args.prompt_tokens,
        "runs": args.runs,
    }
    write_json(
        out_dir / "joins.json", {"settings": settings, "figures": figures, "runs": [asdict(join) for join in joins]}
    )
    head = ("mode", "median", "p90", "p99", "read alone", "read joining")
    row = [mode, *(f"{figures[name]:.2f}x" for name in shares), f"{figures['alone_s']:.2f} s"]
    title = "gaps while the prompt is read, over their median before"
    console.print(rich_table(title, head, [[*row, f"{figures['joining_s']:.2f} s"]]))
    console.print(f"details: {out_dir / 'joins.json'}", markup=False, highlight=False, soft_wrap=True)
    return 0


def measure(engine: Engine, rows: Sequence[list[int]], prompt: list[int]) -> Join:
    """Decode these rows (token ids), which a prompt joins."""
    endless = SamplingParams(max_new_tokens=engine.max_context, ignore_eos=True)
    one = SamplingParams(max_new_tokens=1)
    engine.forget()
    alone_s = _until_read(engine, prompt, one, {}, [])
    engine.forget()
    requests = [engine.add(ids, endless) for ids in rows]
    last: dict[object, float] = {}
    before: list[float] = []
    while engine.num_waiting or len(last) < len(rows):
        _step(engine, last, [])
    for step in range(STEPS_BEFORE):
        _step(engine, last, before if step >= SETTLING else [])
    during: list[float] = []
    joining_s = _until_read(engine, prompt, one, last, during)
    for request in requests:
        engine.cancel(request)
    if not before or not during:
        raise ValueError("the rows ended before the prompt was read; raise --max-context")
    return Join(before=before, during=during, alone_s=alone_s, joining_s=joining_s)


def _until_read(
    engine: Engine, prompt: list[int], params: SamplingParams, last: dict[object, float], gaps: list[float]
) -> float:
    started, request = time.perf_counter(), engine.add(prompt, params)
    while request.finish_reason is None:
        _step(engine, last, gaps)
    return time.perf_counter() - started


def _step(engine: Engine, last: dict[object, float], gaps: list[float]) -> None:
    """A step, and the gaps that end with it; `last`: when each request's last chunk came."""
    chunks = engine.step()
    now = time.perf_counter()
    gaps += [now - last[chunk.request] for chunk in chunks if chunk.request in last]
    last |= {chunk.request: now for chunk in chunks}
