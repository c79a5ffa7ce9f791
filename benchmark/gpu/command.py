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
        "process with a time limit. --device cpu goes through the steps in tiny sizes, to try them out. Into an "
        "--out-dir of before, steps are added.",
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu")
    parser.add_argument("--step", metavar="NAME[,NAME]", help="these steps only")
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
    from sharesd.device import device_of

    device_of(args.device)  # ValueError without a GPU, before anything else; only the steps' processes use it
    folder = arguments.out_folder(args.out_dir, "gpu")
    file = folder / "gpu.json"
    outcomes: dict[str, Any] = read_json(file)["steps"] if file.exists() else {}
    values = {"command": arguments.command(), "environment": environment("cpu")}
    started, failed = time.perf_counter(), False
    for step in steps:
        left = args.budget - (time.perf_counter() - started)
        if step.limit_s > left:
            reason = f"it may take {step.limit_s:g} s, and {max(left, 0):.0f} of {args.budget:g} s were left"
            outcomes.setdefault(step.name, {"state": "skipped", "reason": reason})
        else:
            said = f"measuring {step.name}, {step.limit_s:g} s at most: {step.about}"
            err_console.print(said, highlight=False, soft_wrap=True)
            outcomes[step.name] = _outcome(step, folder, args)
            failed |= outcomes[step.name]["state"] == "failed"
        values["steps"] = {each.name: outcomes[each.name] for each in STEPS if each.name in outcomes}
        write_json(file, values)
        replace_file(folder / "gpu.md", report.markdown(values))
    console.print(f"report: {folder / 'gpu.md'}", highlight=False, soft_wrap=True)
    return int(failed)


def _outcome(step: Step, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    findings = folder / f"{step.name}.json"
    findings.unlink(missing_ok=True)
    options = ["--device", args.device, *(["--target", args.target] if args.target else [])]
    outcome = agenda.run_step(step, agenda.worker(step, findings, *options), findings)
    if outcome["state"] == "failed":
        err_console.print(f"{step.name} failed: {outcome['reason']}", highlight=False, markup=False, soft_wrap=True)
    return outcome
