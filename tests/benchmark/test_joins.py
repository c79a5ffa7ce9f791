"""The benchmark of a prompt that joins others, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.__main__ import main
from benchmark.studies.joins import Join
from tests.helpers.tiny_models import make_checkpoint


def test_a_prompt_joins_rows_that_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rows", "2", "--prompt-tokens", "40", "--runs", "2", "--mode", "naive", "--max-context", "512"]
    target, out = str(make_checkpoint(tmp_path / "model")), tmp_path / "out"
    assert main(["joins", "--target", target, "--out-dir", str(out), *options]) == 0
    report = json.loads((out / "joins.json").read_text())
    assert report["settings"]["rows"] == 2 and "gaps while the prompt is read" in capsys.readouterr().out
    for run in report["runs"]:
        assert len(run["before"]) == 80 and len(run["during"]) % 2 == 0 and run["during"]
        assert min(*run["before"], *run["during"], run["alone_s"], run["joining_s"]) > 0
    assert main(["joins", "--target", target, "--prompt-tokens", "600", "--max-context", "512"]) == 2
    assert "raise --max-context" in capsys.readouterr().err


def test_gaps_are_compared_with_the_median_before() -> None:
    join = Join(before=[2.0, 1.0, 9.0], during=[4.0, 2.0, 8.0, 6.0], alone_s=1.0, joining_s=2.0)
    assert [join.during_over_median(share) for share in (0.0, 0.5, 0.99)] == [1.0, 3.0, 4.0]
