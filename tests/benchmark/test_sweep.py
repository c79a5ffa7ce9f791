"""The sweep benchmark on a tiny model: its grid, its files, its picture, and mistakes on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.studies.sweep import Cell, configs_of, draw
from sharesd.config import EngineConfig
from tests.helpers.tiny_models import make_checkpoint

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def sweep(tiny: Path, out: Path, *argv: str) -> dict[str, Any]:
    """sweep.json of a run over two questions."""
    sizes = ["--num-questions", "2", "--max-new-tokens", "12", "--max-context", "512"]
    assert main(["sweep", "--target", str(tiny), "--out-dir", str(out), *sizes, *argv]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["sweep.json", "sweep.png"]
    assert (out / "sweep.png").read_bytes().startswith(PNG)
    return json.loads((out / "sweep.json").read_text())


def test_one_setting(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = sweep(tiny, tmp_path / "out", "--mode", "share", "--over", "K=3,1", "--draft-quant", "hqq:8:64")
    assert [cell["values"] for cell in report["cells"]] == [{"K": 1}, {"K": 3}]
    for cell in report["cells"]:
        assert cell["speedup"] == pytest.approx(cell["tokens_per_second"] / cell["naive_tokens_per_second"])
        assert 1 <= cell["tau"] <= 1 + cell["values"]["K"] and cell["identical"] == 1
    assert report["settings"]["over"] == {"K": [1, 3]} and report["settings"]["mode"] == "share"
    out = capsys.readouterr().out
    assert "mode share" in out and "tau" in out and out.count("x *") == 1


@pytest.mark.parametrize("mode", [("ngram",), ("hybrid", "--hybrid-drafters", "share,ngram")])
def test_two_settings(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: tuple[str, ...]) -> None:
    argv = ("--over", "max-draft=2,4", "--over", "ngram-max=1,3")
    report = sweep(tiny, tmp_path / "out", "--mode", *mode, "--ngram-min", "2", *argv)
    assert [cell["values"] for cell in report["cells"]] == [
        {"max-draft": 2, "ngram-max": 3},
        {"max-draft": 4, "ngram-max": 3},
    ]
    err = capsys.readouterr().err
    assert "left out, with ngram-min above ngram-max: max-draft=2, ngram-max=1; max-draft=4," in err


def test_settings_become_configs() -> None:
    config = EngineConfig(mode="ngram", max_draft=5)
    points = configs_of(config, [("K", (1, 2)), ("ngram-min", (2,))])
    assert [(c.num_draft, c.ngram_min, c.most_draft) for _, c in points] == [(1, 2, 1), (2, 2, 2)]
    [(values, found)] = configs_of(config, [("max-draft", (3,))])
    assert values == {"max-draft": 3} and found.num_draft is None and found.most_draft == 3
    trees = configs_of(EngineConfig(tree=(2, 4, 8)), [("tree-depth", (2, 3)), ("tree-budget", (5,))])
    assert [c.tree for _, c in trees] == [(2, 2, 5), (2, 3, 5)]


@pytest.mark.parametrize("speedups", [(0.5, 2.0), (None, 1.0), (None, None), (1.0, 1.0)])
def test_pictures_stand_what_was_not_measured(tmp_path: Path, speedups: tuple[float | None, ...]) -> None:
    cells = [
        Cell(
            values={"K": K, "ngram-max": 1},
            tokens_per_second=1,
            naive_tokens_per_second=1,
            speedup=speedup,
            tau=1,
            alpha=0,
            identical=1,
        )
        for K, speedup in zip((1, 2), speedups, strict=True)
    ]
    draw(tmp_path / "a.png", "t", "ngram", [("K", (1, 2))], cells)
    draw(tmp_path / "b.png", "t", "ngram", [("K", (1, 2)), ("ngram-max", (1, 2))], cells)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]
    assert all(path.read_bytes().startswith(PNG) for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--mode", "share", "--over", "ngram-max=1,2"), "--over names ngram-max, but no ngram table drafts; use"),
        (("--mode", "hybrid", "--over", "ngram-min=1"), "--over names ngram-min, but no ngram table drafts; use"),
        (
            ("--mode", "share", "--over", "K=1", "--over", "K=2"),
            "--over names K, K; give one setting, or two different",
        ),
        (("--mode", "share", "--over", "K=1", "--over", "max-draft=2"), "drop one of the two"),
        (
            ("--mode", "share", "--over", "K=1,2", "--num-speculative-tokens", "3"),
            "--num-speculative-tokens is 3 and --over names K; drop",
        ),
        (("--mode", "share", "--over", "tree-budget=8"), "--over names tree-budget, but there is no tree; give"),
        (("--mode", "ngram", "--over", "ngram-min=5,6"), "every point has ngram-min above ngram-max"),
    ],
)
def test_mistakes_cost_a_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str
) -> None:
    assert main(["sweep", "--target", str(tiny), "--out-dir", str(tmp_path / "out"), *argv]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("over", ["K", "K=", "K=0", "depth=1,2", "K=1,x"])
def test_settings_are_written_as_lists(over: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sweep", "--mode", "share", "--over", over])
    err = capsys.readouterr().err
    assert caught.value.code == 2 and err.startswith("error: argument --over:") and err.count("\n") == 1
