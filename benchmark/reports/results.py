"""What a measurement ends with: summary.json, report.md, report.html, pictures, and a table on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmark.questions import records
from benchmark.questions.job import Job
from benchmark.questions.records import Key, TurnRecord
from benchmark.reports.report import markdown
from benchmark.reports.report_html import html_page
from benchmark.reports.summary import summarize
from benchmark.reports.table import rich_table
from sharesd.cli.console import console, err_console
from sharesd.cli.pictures import can_draw
from sharesd.models.hub import resolve
from sharesd.models.tokenizer import load_tokenizer


def write_results(job: Job, state: Mapping[str, Any], done: Mapping[str, Mapping[Key, TurnRecord]]) -> None:
    """Write all files from what is there, and show the table."""
    summary = summary_of(job, state, done)
    records.write_json(job.out_dir / "summary.json", summary)
    plots = _plots(job.out_dir, summary)
    records.replace_file(job.out_dir / "report.md", markdown(summary, plots))
    console.print(rich_table(summary))
    for mode, figures in summary["modes"].items():
        share = figures["identical_to_naive"]
        if share is not None and share < 1 and job.params.acceptance == "match":
            err_console.print(f"[bold red]{mode} did not give the text of naive everywhere; see the report[/]")
    page = html_page(
        summary,
        {name: (job.out_dir / name).read_bytes() for name in plots},
        job.questions.questions,
        [(mode, found[key]) for key in job.keys for mode, found in done.items() if key in found],
        load_tokenizer(resolve(job.config.target)),
    )
    records.replace_file(job.out_dir / "report.html", page)
    console.print(f"report: {job.out_dir / 'report.md'}, and report.html beside it", highlight=False, soft_wrap=True)


def _plots(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """Names of the pictures, drawn where matplotlib is installed."""
    if not can_draw("speed.png", "acceptance.png"):
        return []
    from benchmark.reports.plots import draw_plots

    return draw_plots(folder, summary)


def summary_of(job: Job, state: Mapping[str, Any], done: Mapping[str, Mapping[Key, TurnRecord]]) -> dict[str, Any]:
    """The contents of summary.json: figures of the records and facts of the sessions."""
    sessions = state["sessions"]
    first = sessions[0]
    missing = sum(key not in found for found in done.values() for key in job.keys)
    modes = summarize(done, job.keys, num_draft=job.config.most_draft)
    for mode, figures in modes.items():
        figures["accepted_by"] = accepted_by(done[mode].values())
    shared = {
        "load_seconds": first["load_seconds"],
        "peak_memory_bytes": max(session["peak_memory_bytes"] for session in sessions),
        "weight_bytes": first["weight_bytes"],
        "kv_bytes": first["kv_bytes"],
    }
    facts = ("dtype", "device", "compile", "max_context", "architecture", "prompt_format")
    return {
        "environment": state["environment"],
        "settings": {**state["settings"], **{name: first[name] for name in facts}},
        "status": {"complete": missing == 0, "num_missing_turns": missing},
        "num_sessions": len(sessions),
        "ready_seconds": first["ready_seconds"],
        "recompiles": sum(session["recompiles"] for session in sessions),
        "modes": {mode: {**figures, **shared, **first["modes"][mode]} for mode, figures in modes.items()},
    }


def accepted_by(turns: Iterable[TurnRecord]) -> dict[str, int]:
    """Accepted tokens by who drafted them, most first."""
    total: Counter[str] = Counter()
    for record in turns:
        total.update(record.accepted_by)
    return dict(total.most_common())
