"""The command line of `gpu`, and its loop over the steps."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmark import arguments
from benchmark.gpu import agenda, report
from benchmark.gpu.agenda import STEPS, Step
from benchmark.questions.records import read_json, replace_file, write_json
from sharesd.cli.console import console, err_console

BUDGET_S = 1740.0


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "gpu",
        help="the whole agenda for a GPU in one go",
        description="Measure kernels, speed, acceptance, exactness, start and memory on a GPU, step by step, each in a "
        "process with a time limit, the most valuable first. In an --out-dir of before it goes on: steps that are done "
        "stay as they are.",
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu, where sizes are tiny")
    parser.add_argument("--step", metavar="NAME[,NAME]", help="these steps only, anew")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the steps out")
    parser.add_argument("--list", action="store_true", help="name the steps and their time limits, and measure nothing")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="S", help="seconds for all; steps that may take longer than "
        "what is left are skipped",
    )  # fmt: skip
    parser.add_argument(
        "--target", metavar="MODEL", help="a small Llama checkpoint, in place of the embedded SmolLM2-135M-Instruct"
    )
    arguments.add_out_dir(parser, "gpu")


def run(args: argparse.Namespace) -> int:
    """Run the steps; returns 0, or 1 if one failed."""
    steps = agenda.named(arguments.each("--step", str, args.step)) if args.step else STEPS
    if args.list:
        rows = [[step.name, f"{step.limit_s:g} s", step.about] for step in steps]
        console.print(arguments.markdown_table(("step", "limit", "what"), rows, left=3), markup=False, soft_wrap=True)
        return 0
    from benchmark.environment import environment
    from sharesd.devices.selection import device_of

    device_of(args.device)  # ValueError without a GPU, before anything else; only the steps' processes use it
    folder = arguments.out_folder(args.out_dir, "gpu")
    file = folder / "gpu.json"
    outcomes: dict[str, Any] = read_json(file)["steps"] if file.exists() else {}
    values = {"command": arguments.command(), "environment": environment("cpu")}

    def note(name: str, outcome: dict[str, Any]) -> None:
        outcomes[name] = outcome
        values["steps"] = {each.name: outcomes[each.name] for each in STEPS if each.name in outcomes}
        write_json(file, values)
        replace_file(folder / "gpu.md", report.markdown(values))

    started, failed = time.perf_counter(), False
    for step in steps:
        before = outcomes.get(step.name, {})
        left = args.budget - (time.perf_counter() - started)
        if before.get("state") == "done" and not args.step:
            _say(f"{step.name} is done already; --step {step.name} measures it anew")
        elif step.limit_s <= left:
            _say(f"measuring {step.name}, {step.limit_s:g} s at most: {step.about}")
            note(step.name, {"state": "cut off", "reason": f"it was not ended; {step.name}.json has what it found"})
            note(step.name, outcome := _outcome(step, folder, args))
            failed |= outcome["state"] == "failed"
        elif not before:
            reason = f"it may take {step.limit_s:g} s, and {max(left, 0):.0f} of {args.budget:g} s were left"
            note(step.name, {"state": "skipped", "reason": reason})
    console.print(f"report: {folder / 'gpu.md'}", highlight=False, soft_wrap=True)
    return int(failed)


def _say(text: str) -> None:
    err_console.print(text, highlight=False, markup=False, soft_wrap=True)


def _outcome(step: Step, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    findings = folder / f"{step.name}.json"
    findings.unlink(missing_ok=True)
    options = ["--device", args.device, *(["--target", args.target] if args.target else [])]
    options += ["--tiny"] if args.tiny else []
    outcome = agenda.run_step(step, agenda.worker(step, findings, *options), findings)
    if outcome["state"] == "failed":
        _say(f"{step.name} failed: {outcome['reason']}")
    return outcome
