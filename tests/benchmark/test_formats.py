"""Fields of JSON and CSV files are those of docs/reference/figures.md."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmark.__main__ import main
from benchmark.report import Report
from sharesd.engine.stats import Stats
from sharesd.reports.tables import Section
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import make_checkpoint

PAGE = (ROOT / "docs" / "reference" / "figures.md").read_text("utf-8")
OVER_NAIVE = {"speedup", "c", "v"}


def named(table: str) -> set[str]:
    """Names in the first column of a marked table."""
    rows = PAGE.partition(f"<!-- {table}: ")[2].partition(f"<!-- /{table} -->")[0].splitlines()
    return {name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_figures_of_stats_are_documented() -> None:
    assert named("figures") == Stats().to_dict().keys()


def test_figures_by_hand() -> None:
    """Three rounds: none drafted; 3 drafted, 2 accepted and one recovered; 2 drafted, both accepted and a bonus."""
    stats = Stats(3, accepted_at=[0] * 3, reached_at=[0] * 3)
    for num_drafted, num_accepted, count in ((0, 0, 1), (3, 2, 3), (2, 2, 3)):
        stats.record_round(num_drafted, num_drafted, num_accepted, count)
    stats.sources = Counter(target=1, accepted=4, recovered=1, bonus=1)
    stats.record_step(5, 0.5, 1.0, 0.5)
    found = stats.to_dict()
    assert found["tau"] == 7 / 3 and found["tau_drafted"] == 6 / 2 and found["alpha"] == 4 / 5
    assert found["acceptance_by_position"] == [2 / 3, 2 / 3, 0]
    assert found["conditional_acceptance"] == [1, 1, 0]
    assert found["draft_share"] == 4 / 7 and found["drafted_per_round"] == 5 / 3
    assert found["sources"] == dict(stats.sources) and (found["steps"], found["draft_steps"]) == (1, 5)
    assert found["draft_step_ms"] == 100 and found["overhead_share"] == 0.25 and found["tokens_per_second"] == 3.5


def test_a_draft_that_an_end_cut_was_not_refused() -> None:
    stats = Stats(4, accepted_at=[0] * 4, reached_at=[0] * 4)
    stats.record_round(4, 4, 3, 2)  # the answer ended at the second token of an accepted draft
    assert stats.accepted_at == [1, 1, 0, 0] and stats.reached_at == [1, 1, 0, 0]
    stats.record_round(4, 2, 1, 2)  # a tree of two levels
    assert stats.reached_at == [2, 2, 0, 0] and stats.to_dict()["conditional_acceptance"] == [1, 0.5]


def test_nothing_is_undefined() -> None:
    found = Stats().to_dict()
    assert [name for name, value in found.items() if value is None] == [
        "tokens_per_second",
        *("tau", "tau_drafted", "alpha", "draft_share", "drafted_per_round"),
        *("draft_step_ms", "draft_ms", "verify_ms", "overhead_ms", "overhead_share"),
    ]


def test_a_run_has_the_documented_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("sharesd.cli.console.set_up_logging", lambda level: None)
    make_checkpoint(tmp_path / "model")
    Path("q.jsonl").write_text('{"question_id": 1, "category": "sky", "turns": ["why is the sky blue"]}\n')
    given = ["--target", "model", "--questions", "q.jsonl", "--mode", "naive,ngram", "--runs", "2", "--compile", "off"]
    assert main(["mtbench", *given, "--max-context", "128", "--max-new-tokens", "8", "--out-dir", "out"]) == 0
    found = json.loads(Path("out/summary.json").read_text())
    assert (
        found.keys() == named("summary") and found["format"] == json.loads(Path("out/run.json").read_text())["format"]
    )
    figures = found["modes"]["ngram"]
    names = {name.removesuffix("_range") for name in figures}
    assert names == named("mode") | named("figures") | OVER_NAIVE
    assert all(low <= figures[name.removesuffix("_range")] <= high for name, (low, high) in ranges(figures))
    row = row_of("ngram", Path("out/report.csv"))
    assert row["tok/s"] == f"{figures['tokens_per_second']:.1f}" and row["tau"] == f"{figures['tau']:.2f}"
    row = row_of("ngram", Path("out/report-drafts.csv"))
    assert row["tau, drafted"] == ("" if figures["tau_drafted"] is None else f"{figures['tau_drafted']:.2f}")
    row = row_of("ngram", Path("out/report-medians-and-ranges-of-runs.csv"))
    low, high = figures["tokens_per_second_range"]
    assert (row["tok/s min"], row["tok/s max"]) == (f"{low:.1f}", f"{high:.1f}")


def row_of(mode: str, file: Path) -> dict[str, str]:
    [row] = [row for row in csv.DictReader(file.read_text().splitlines()) if row["mode"] == mode]
    return row


def ranges(figures: dict) -> list:
    return [(name, value) for name, value in figures.items() if name.endswith("_range") and value is not None]


def test_csv_has_plain_numbers_and_columns_for_ranges() -> None:
    rows = [["naive", "1x", "4.0 (3.5 to 4.5)", "-", "100 %"], ["eagle", "1.50x", "2.0", "1/2", "-"]]
    section = Section("", ("mode", "speedup", "ms", "done", "ms"), rows)
    assert (
        section.csv()
        == "mode,speedup,ms,ms min,ms max,done,ms\nnaive,1,4.0,3.5,4.5,,100 %\neagle,1.50,2.0,2.0,2.0,1/2,\n"
    )


def test_every_table_is_a_csv_file(tmp_path: Path) -> None:
    sections = [Section("", ("a",), [["1"]]), Section("Text", text="x"), Section("Speed (of all)", ("b",), [["2"]])]
    Report(title="t", sections=sections).publish(tmp_path, "report")
    assert {path.name: path.read_text() for path in tmp_path.glob("*.csv")} == {
        "report.csv": "a\n1\n",
        "report-speed.csv": "b\n2\n",
    }
