"""Command `compare`: finished runs side by side, with ratios and what differs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from benchmark import arguments
from benchmark.report import Report
from sharesd.reports import environment
from sharesd.reports.pictures import can_draw
from sharesd.reports.tables import ABSENT, Section, bullets, differing, flat, ranged, read_json, write_json

SAME = {"files.target": "targets", "questions.sha256": "questions", "sampling.max_new_tokens": "lengths of answers"}
LEGEND = "Over the first: speedup over that of the first run, tokens per second where there is none; ranges of runs."
Runs = Mapping[str, dict[str, Any]]  # name -> contents of summary.json


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="compare finished runs of mtbench, gsm8k or humaneval",
        description="Compare modes of finished runs with those of the first: ratios with ranges, and other settings.",
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or its summary.json or CSV")
    parser.add_argument("--force", action="store_true", help="also compare runs with other questions or targets")
    arguments.add_out_dir(parser, "compare")


def run(args: argparse.Namespace) -> int:
    """Write the comparison and print it; return 0."""
    runs = {text.rstrip("/"): _read(Path(text)) for text in args.runs}
    if len(runs) < 2:
        raise ValueError(f"compare needs two runs or more, not only {', '.join(runs)}")
    settings = {name: flat(found["settings"]) for name, found in runs.items()}
    _require_same(settings, args.force)
    for name, found in runs.items():
        settings[name] |= {key: found["environment"].get(key) for key in environment.IDENTITY}
    changed = differing([{**each, "command": None} for each in settings.values()])
    ratios = {mode: ratios_of(runs, mode) for each in runs.values() for mode in each["modes"]}
    figures, columns = [], {"tok/s": "tokens_per_second", "tau": "tau", "alpha": "alpha", "c": "c", "v": "v"}
    rows, remarks, first = [], list[str](), next(iter(runs))
    for mode, (name, found) in product(ratios, runs.items()):
        if each := found["modes"].get(mode):
            over = ratios[mode].get(name)
            rows.append([mode, name, ranged(each, "speedup"), ranged(over or {}, "ratio")])
            figures.append([mode, name, *(ranged(each, key) for key in columns.values())])
            remarks += [remark_on(f"{mode} of {name}", first, over)] if over else []
    out_dir, plots = environment.out_folder(args.out_dir, "compare"), list[str]()
    if can_draw("compare.png"):
        from benchmark.plots import draw_runs

        plots = [draw_runs(out_dir / "compare.png", runs)]
    about = {"command": environment.command(), "runs": list(runs)}
    write_json(
        out_dir / "compare.json", {"format": environment.FORMAT, **about, "ratios": ratios, "differing": changed}
    )
    changes = [[name, *(ABSENT if x is None else str(x) for x in each)] for name, each in changed.items()]
    sections = [
        Section("", ("mode", "run", "speedup", "over the first"), rows, left=2, text=LEGEND),
        Section("What differs", ("setting", *runs), changes, left=9),
        Section("Figures", ("mode", "run", *columns), figures, left=2),
        Section("Remarks", text=bullets(remarks)),
    ]
    report = Report(title=f"Comparison with {first}", sections=sections, settings=about, plots=plots)
    report.publish(out_dir, "compare", shown=2, remarks=remarks)
    return 0


def ratios_of(runs: Runs, mode: str) -> dict[str, dict[str, Any]]:
    """Return ratios of a mode's speedups to the first run's, with ranges.

    Without naive they are ratios of tokens per second.
    """
    known = {name: found["modes"][mode] for name, found in runs.items() if mode in found["modes"]}
    key = "speedup" if all(each["speedup"] for each in known.values()) and mode != "naive" else "tokens_per_second"
    first, *others = known
    (a, around_a), found = (known[first][key], known[first][f"{key}_range"]), {}
    for name in others if first == next(iter(runs)) else ():
        b, around_b = known[name][key], known[name][f"{key}_range"]
        if a and b:
            around = [around_b[0] / around_a[1], around_b[1] / around_a[0]]
            is_single = min(known[each]["num_runs"] for each in (first, name)) == 1
            found[name] = {"ratio": b / a, "ratio_range": around, "of": key, "is_single": is_single}
    return found


def remark_on(what: str, first: str, found: Mapping[str, Any]) -> str:
    """Return a sentence on a ratio."""
    low, high = found["ratio_range"]
    if found["is_single"]:
        return f"{what} over {first}: one of them was measured once, so the noise is unknown; use --runs 3"
    if low <= 1 <= high:
        return f"{what} does not measurably differ from {first}: the ranges overlap"
    return f"{what} is {'faster' if low > 1 else 'slower'} than {first}: {ranged(found, 'ratio')}"


def _read(path: Path) -> dict[str, Any]:
    path = path.parent if path.suffix == ".csv" else path
    file = path / "summary.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist; use the folder of a run of mtbench, gsm8k or humaneval")
    found = read_json(file)
    if found.get("format") != environment.FORMAT or not {"modes", "settings", "environment"} <= found.keys():
        raise ValueError(f"{file} is not a summary of format {environment.FORMAT}; measure again with this version")
    return found


def _require_same(settings: Mapping[str, Mapping[str, Any]], force: bool) -> None:
    for key, what in SAME.items():
        values = {name: each.get(key) for name, each in settings.items()}
        if len({*values.values()}) > 1 and not force:
            shown = ", ".join(f"{name} {str(value)[:12]}" for name, value in values.items())
            raise ValueError(f"the runs have other {what} ({key}: {shown}); name runs of the same, or add --force")
