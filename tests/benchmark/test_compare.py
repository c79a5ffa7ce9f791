"""Comparison of finished runs: ratios with ranges, what differs, and refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import main
from sharesd.reports.environment import FORMAT

PNG = b"\x89PNG"


def summary_of(folder: Path, speeds: dict[str, tuple[float, float, float]], **settings: Any) -> Path:
    """Write a summary with each mode's median, least and greatest speedup; naive decodes 10 tokens per second."""
    modes = {}
    for mode, (middle, low, high) in speeds.items():
        figures = {"speedup": middle, "tokens_per_second": 10 * middle, "tau": 2.0, "alpha": 0.5, "c": 0.1, "v": 1.2}
        around = {"speedup_range": [low, high], "tokens_per_second_range": [10 * low, 10 * high]}
        modes[mode] = {**figures, **around, "num_runs": 1 if low == high else 3}
    fixed = {"command": folder.name, "files": {"target": "a" * 64}, "questions": {"sha256": "b"}, "sampling": {}}
    summary = {"format": FORMAT, "settings": {**fixed, **settings}, "environment": {"torch": "2"}, "modes": modes}
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_ratios_have_ranges_and_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    summary_of(Path("a"), {"naive": (1, 0.9, 1.1), "eagle": (1.5, 1.4, 1.6), "share": (1.2, 1.1, 1.3)}, num_draft=4)
    summary_of(Path("b"), {"naive": (1, 0.9, 1.1), "eagle": (1.8, 1.7, 2.0), "share": (1.25, 1.2, 1.3)}, num_draft=8)
    summary_of(Path("c"), {"eagle": (1.8, 1.8, 1.8), "ngram": (1.1, 1.0, 1.2)}, num_draft=8)
    assert main(["compare", "a", "b/", "c/summary.json", "--out-dir", "out"]) == 0
    out = capsys.readouterr().out
    found = json.loads(Path("out/compare.json").read_text())
    assert found["format"] == FORMAT and found["differing"] == {"num_draft": [4, 8, 8]}
    eagle = found["ratios"]["eagle"]["b"]
    assert eagle["ratio"] == pytest.approx(1.2) and eagle["ratio_range"] == pytest.approx([1.7 / 1.6, 2.0 / 1.4])
    assert found["ratios"]["ngram"] == {}, "the first run has no such mode"
    for line in (
        "eagle of b is faster than a: 1.20 (1.06 to 1.43)",
        "share of b does not measurably differ from a: the ranges overlap",
        "eagle of c/summary.json over a: one of them was measured once, so the noise is unknown",
    ):
        assert line in out and line in Path("out/compare.md").read_text()
    rows = list(csv.DictReader(Path("out/compare.csv").read_text().splitlines()))
    names = ("speedup", "over the first", "over the first min", "over the first max")
    assert [[row[name] for name in names] for row in rows if row["mode"] == "eagle"][:2] == [
        ["1.50", "", "", ""],
        ["1.80", "1.20", "1.06", "1.43"],
    ]
    assert Path("out/compare.png").read_bytes().startswith(PNG)


def test_without_naive_speeds_are_compared() -> None:
    for name, speed in (("a", 1.0), ("b", 2.0)):
        summary_of(Path(name), {"eagle": (speed, 0.9 * speed, 1.1 * speed)})
        file = Path(name) / "summary.json"
        summary = json.loads(file.read_text())
        summary["modes"]["eagle"] |= {"speedup": None, "speedup_range": None}
        file.write_text(json.dumps(summary))
    assert main(["compare", "a", "b/report.csv", "--out-dir", "out"]) == 0
    found = json.loads(Path("out/compare.json").read_text())["ratios"]["eagle"]["b/report.csv"]
    assert found["of"] == "tokens_per_second" and found["ratio"] == 2.0


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"files": {"target": "c" * 64}}, "the runs have other targets (files.target: a aaaaaaaaaaaa, b cccccccccccc)"),
        ({"questions": {"sha256": "d"}}, "the runs have other questions (questions.sha256: a b, b d)"),
    ],
)
def test_other_questions_and_targets_need_force(
    other: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary_of(Path("a"), {"eagle": (1.5, 1.4, 1.6)})
    summary_of(Path("b"), {"eagle": (1.5, 1.4, 1.6)}, **other)
    assert main(["compare", "a", "b", "--out-dir", "out"]) == 2
    assert f"error: {says}; name runs of the same, or add --force" in capsys.readouterr().err
    assert not Path("out").exists()
    assert main(["compare", "a", "b", "--out-dir", "out", "--force"]) == 0


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    summary_of(Path("a"), {"eagle": (1.5, 1.4, 1.6)})
    Path("old.json").write_text("{}")
    for argv, says in (
        (["a"], "compare needs two runs or more, not only a"),
        (["a", "none"], "none does not exist; use the folder of a run"),
        (["a", "old.json"], f"old.json is not a summary of format {FORMAT}; measure again with this version"),
    ):
        assert main(["compare", *argv]) == 2
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1
