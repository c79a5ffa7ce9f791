"""Packages of extras that are missing: one line with the command that installs them; data without its pictures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from serve.command import main as serve
from sharesd.data import grammar_spec
from sharesd.reports.pictures import can_draw
from train.heads.metrics_log import CURVES, LOG, MetricsLog


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.mark.usefixtures("without_matplotlib")
def test_one_line_names_the_pictures_and_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert not can_draw("speed.png", "acceptance.png")
    line = "speed.png and acceptance.png: not drawn, matplotlib is not installed; run: pip install matplotlib\n"
    assert capsys.readouterr().err == line


@pytest.mark.usefixtures("without_matplotlib")
def test_a_training_says_it_once_and_keeps_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog(tmp_path, -1)
    for step in (1, 2):
        log.add(step, loss=1.0)
        log.draw()
    log.close()
    assert capsys.readouterr().err.count(f"{CURVES}: not drawn") == 1
    assert len((tmp_path / LOG).read_text().splitlines()) == 2 and not (tmp_path / CURVES).exists()


def test_with_matplotlib_curves_are_drawn_and_nothing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert can_draw("speed.png")
    log = MetricsLog(tmp_path, -1)
    log.add(1, loss=1.0)
    log.draw()
    log.close()
    assert (tmp_path / CURVES).stat().st_size > 10_000 and not capsys.readouterr().err


def test_the_server_names_its_packages(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "serve.server", None)
    assert serve(["--port", "0"]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "run: pip install fastapi uvicorn prometheus-client llguidance" in said


def test_grammars_name_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match="run: pip install llguidance"):
        grammar_spec.llguidance()
