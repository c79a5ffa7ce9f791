"""The benchmark with busy neighbours on a tiny model: its processes, its verdicts, and mistakes on the command line."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from benchmark.__main__ import main
from benchmark.studies.busy import Figures, verdict_of
from tests.helpers.tiny_models import make_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def test_processes_are_measured_alone_and_beside_others(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [
        "--num-questions",
        "2",
        "--max-new-tokens",
        "6",
        "--runs",
        "1",
        "--max-context",
        "512",
        "--compare",
        "auto,1",
    ]
    assert main(["busy", "--target", str(tiny), "--out-dir", str(tmp_path / "out"), *sizes]) == 0
    report = json.loads((tmp_path / "out" / "busy.json").read_text())
    assert [each["threads"] for each in report["figures"]] == ["auto", "1"]
    for each in report["figures"]:
        assert len(each["quiet"]) == len(each["busy"]) == 2 and min(*each["quiet"], *each["busy"]) > 0
    assert report["identical"] and report["settings"]["busy_neighbours"] == 1
    assert "auto, busy:" in capsys.readouterr().out and not multiprocessing.active_children()


def test_verdicts() -> None:
    auto = Figures(threads="auto", quiet=[1.0, 1.1, 1.0], busy=[2.0, 2.2, 9.0])
    one = Figures(threads="1", quiet=[2.0, 2.0, 2.0], busy=[1.0, 1.1, 1.0])
    assert verdict_of([auto, one], True) == [
        "auto: 0.50 of its quiet speed is left (wanted: 0.7)",
        "auto, quiet: 2.00 of the best fixed number, 1 thread (wanted: 0.9)",
        "auto, busy: 0.50 of the best fixed number, 1 thread (wanted: 0.9)",
        "all texts identical",
    ]
    assert verdict_of([one], False) == [
        "1 thread: 2.00 of its quiet speed is left",
        "texts differ between numbers of threads",
    ]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--compare", "auto,0"), "--compare holds '0'"),
        (("--max-new-tokens", "1"), "--max-new-tokens is 1;"),
        (("--mode", "hybrid", "--corpus", "none.npy", "--compare", "1"), "none.npy does not exist"),
    ],
)
def test_mistakes_cost_a_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str
) -> None:
    sizes = ["--num-questions", "1", "--max-new-tokens", "4", "--max-context", "512"]
    assert main(["busy", "--target", str(tiny), "--out-dir", str(tmp_path / "out"), *sizes, *argv]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
