"""`gpu`: run the steps and write the report."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

from benchmark import arguments
from benchmark.gpu import agenda
from benchmark.gpu.agenda import STEPS, AgendaStep
from benchmark.report import Report
from sharesd.cli.console import err_console, print_line
from sharesd.cli.parse_types import parts_of
from sharesd.reports.environment import command, environment, out_folder
from sharesd.reports.tables import Section, read_json, write_json
from sharesd_files import atomic_write

BUDGET_S = 1860.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "gpu",
        help="all measurements on a GPU in one run",
        description="Measure kernels, speed, acceptance, exactness, start and memory on a GPU, in steps, each in a "
        "process with a time limit, the most valuable first. With the --out-dir of an earlier run it resumes: finished "
        "steps are kept.",
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu (with tiny sizes)")
    parser.add_argument("--step", metavar="NAME[,NAME]", help="run only these steps, again if they are done")
    parser.add_argument("--tiny", action="store_true", help="use tiny sizes, to try the steps out")
    parser.add_argument("--list", action="store_true", help="list the steps and their time limits, without measuring")
    text = "seconds for all steps; a step that may take longer than the time left is skipped"
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help=text)
    parser.add_argument(
        "--target", metavar="MODEL", help="a small Llama checkpoint, instead of the embedded SmolLM2-135M-Instruct"
    )
    arguments.add_out_dir(parser, "gpu")


def run(args: argparse.Namespace) -> int:
    """Run the steps; return 1 if one failed, else 0."""
    steps = agenda.named(parts_of("--step", args.step)) if args.step else STEPS
    if args.list:
        for step in steps:
            print_line(f"| {step.name} | {step.limit_s:g} s | {step.about} |")
        return 0
    from sharesd.devices.selection import device_of

    device_of(args.device)  # ValueError without a GPU; only the steps' processes use it
    folder = out_folder(args.out_dir, "gpu")
    file = folder / "gpu.json"
    outcomes: dict[str, Any] = read_json(file)["steps"] if file.exists() else {}
    values = {"command": command(), "environment": environment("cpu")}

    def record(name: str, outcome: dict[str, Any]) -> None:
        outcomes[name] = outcome
        values["steps"] = {each.name: outcomes[each.name] for each in STEPS if each.name in outcomes}
        write_json(file, values)
        atomic_write(folder / "gpu.md", markdown(values))

    started, failed = time.perf_counter(), False
    for step in steps:
        before = outcomes.get(step.name, {})
        left = args.budget - (time.perf_counter() - started)
        if before.get("state") == "done" and not args.step:
            print_line(f"{step.name} is done; --step {step.name} measures it again", err_console)
        elif step.limit_s <= left:
            print_line(f"measuring {step.name}, {step.limit_s:g} s at most: {step.about}", err_console)
            record(step.name, {"state": "cut off", "reason": f"it was interrupted; see {step.name}.json"})
            record(step.name, outcome := _outcome(step, folder, args))
            failed |= outcome["state"] == "failed"
        elif not before:
            reason = f"it may take {step.limit_s:g} s, and only {max(left, 0):.0f} of {args.budget:g} s were left"
            record(step.name, {"state": "skipped", "reason": reason})
    print_line(f"report: {folder / 'gpu.md'}")
    return int(failed)


def _outcome(step: AgendaStep, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    findings = folder / f"{step.name}.json"
    findings.unlink(missing_ok=True)
    options = ["--device", args.device, *(["--target", args.target] if args.target else [])]
    options += ["--tiny"] if args.tiny else []
    outcome = agenda.run_step(step, agenda.worker(step, findings, *options), findings)
    if outcome["state"] == "failed":
        print_line(f"{step.name} failed: {outcome['reason']}", err_console)
    return outcome


def markdown(values: Mapping[str, Any]) -> str:
    """Return the Markdown report of the values in gpu.json."""
    machine, steps = values["environment"], values["steps"]
    device = next((name for outcome in steps.values() if (name := outcome.get("found", {}).get("device"))), None)
    about = {step.name: step.about for step in STEPS}
    rows, missing, sections = [], [], []
    for name, outcome in steps.items():
        is_done = outcome["state"] == "done"
        state = outcome["state"] if is_done else f"{outcome['state']}: {outcome['reason']}"
        rows.append([name, state, f"{outcome.get('seconds', 0):.0f}"])
        if not is_done:
            tail = f"\n\n{indent(outcome['tail'], '    ')}\n" if outcome.get("tail") else ""
            missing.append(f"- {name} ({about.get(name, '')}): {state}{tail}")
        if outcome.get("found"):
            note = "" if is_done else ": unfinished"
            sections += _findings(f"{name}: {about.get(name, '')}{note}", outcome["found"])
    first = Section("", ("step", "outcome", "seconds"), rows, left=2)
    sections = [*_beside_peer(steps), *sections]
    absent = [Section("Missing", text="\n".join(missing))] if missing else []
    intro = f"{machine['date']}, torch {machine['torch']}, triton {machine['triton']}, gemlite {machine['gemlite']}"
    title, settings = f"ShareSD on {device or machine['cpu']}", {"command": values["command"]}
    return Report(title=title, intro=intro, sections=[first, *absent, *sections], settings=settings).markdown()


def _beside_peer(steps: Mapping[str, Any]) -> list[Section]:
    """Return our modes on real text next to transformers on the same model, if this run measured both."""
    ours, peer = (steps.get(name, {}).get("found", {}) for name in ("7b", "peer"))
    speed = peer.get("tokens_per_second")
    if not speed or not ours.get("modes"):
        return []
    rows = [[row["mode"], f"{row['tok/s']:.4g}", f"{row['tok/s'] / speed:.3f}"] for row in ours["modes"]]
    rows.append([f"{peer['package']}, compiled", f"{speed:.4g}", "1"])
    return [Section(f"{ours['model']}, real text", ("mode", "tok/s", "x transformers compiled"), rows, left=1)]


def _findings(title: str, found: Mapping[str, Any]) -> list[Section]:
    tables = {name: value for name, value in found.items() if isinstance(value, list) and value}
    plain = [f"- {name.replace('_', ' ')}: {_shown(found[name])}" for name in found if name not in tables]
    sections = [Section(title, text="\n".join(plain))]
    for name, rows in tables.items():
        head = list(dict.fromkeys(key for row in rows for key in row))
        cells = [[_shown(row.get(key)) for key in head] for row in rows]
        left = sum(all(isinstance(row.get(key), str | None) for row in rows) for key in head)
        sections += [Section(text=f"**{name.replace('_', ' ')}**"), Section("", head, cells, left)]
    return sections


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
