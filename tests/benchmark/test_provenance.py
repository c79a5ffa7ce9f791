"""Provenance of reports: versions, hashes, settings as resolved, and the machine's load."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmark.__main__ import main
from benchmark.report import Report
from sharesd.models.loader import decoder_config
from sharesd.reports import environment
from sharesd.reports.environment import LoadMeter, load_warning, source
from sharesd.reports.tables import flat
from sharesd_files import file_hash
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a short measurement of mode eagle, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("sharesd.cli.console.set_up_logging", lambda level: None)
    model = make_checkpoint(tmp_path / "model")
    make_head(tmp_path / "head", decoder_config(model), "eagle3", dtype=torch.bfloat16)
    Path("q.jsonl").write_text('{"question_id": 1, "category": "sky", "turns": ["why is the sky blue"]}\n')
    given = ["--target", "model", "--questions", "q.jsonl", "--mode", "naive,eagle", "--draft-head", "head"]
    return ["mtbench", *given, "--compile", "off", "--max-context", "128", "--max-new-tokens", "4", "--out-dir", "out"]


def test_reports_name_where_figures_come_from(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked) == 0
    found = json.loads(Path("out/summary.json").read_text())
    files, machine = found["settings"]["files"], found["environment"]
    assert files.keys() == {"target", "head_eagle", "questions"} and all(len(each) == 64 for each in files.values())
    assert files["questions"] == file_hash(Path("q.jsonl"))
    names = sorted(path.name for path in Path("head").iterdir())
    said = subprocess.run(["sha256sum", *names], cwd="head", capture_output=True, check=True).stdout
    Path("sums").write_bytes(said)
    assert files["head_eagle"] == file_hash(Path("sums")), "anyone can compute it"
    assert machine.keys() >= {"commit", "changed", "compiler", "torch", "load_before", "load_during", "cores_of_others"}
    resolved = {name: value for name, value in flat(found["settings"]).items() if name != "command"}
    assert [name for name, value in resolved.items() if value == "auto"] == []
    assert resolved["num_draft"] == "0 to 8" and resolved["tree"] == "off" and resolved["threads"] >= 1
    report = Path("out/report.md").read_text()
    assert f"- files.head_eagle: {files['head_eagle']}" in report and f"- compiler: {machine['compiler']}" in report

    assert main([*asked, "--resume", "--mode", "naive,eagle,ngram"]) == 0, "modes are added"
    more = json.loads(Path("out/summary.json").read_text())
    assert list(more["modes"]) == ["naive", "eagle", "ngram"] and more["added_modes"] == ["ngram"]
    for name in ("tokens_per_second", "load_seconds", "extra_weight_bytes"):
        assert more["modes"]["eagle"][name] == found["modes"]["eagle"][name]
    assert more["settings"]["modes"] == list(more["modes"]) and more["settings"]["files"] == files
    assert "Added later: ngram." in Path("out/report.md").read_text()
    capsys.readouterr()
    assert main([*asked, "--resume"]) == 2, "and none is left out"
    assert "error: --resume: modes was 'naive, eagle, ngram' in out" in capsys.readouterr().err
    asked[asked.index("naive,eagle")] = "naive,eagle,ngram"
    tensors = load_file("head/model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, "head/model.safetensors")
    assert main([*asked, "--resume"]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: --resume: files.head_eagle was ") and files["head_eagle"] in err


def test_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "sharesd" / "cli").mkdir(parents=True)
    (tmp_path / "file").write_text("a")
    for args in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *args], cwd=tmp_path, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "sharesd" / "cli" / "environment.py"))
    assert source.__wrapped__() == {"commit": head.strip(), "changed": False}
    (tmp_path / "file").write_text("b")
    assert source.__wrapped__() == {"commit": head.strip(), "changed": True}
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "a" / "sharesd" / "cli" / "environment.py"))
    assert source.__wrapped__() == {"commit": None, "changed": None}, "installed inside of another repository"


def test_cores_of_others_leave_out_our_own() -> None:
    meter = LoadMeter()
    meter._busy -= 100.0  # another program's work
    seconds = time.monotonic() - meter._started
    assert meter.read()["cores_of_others"] >= 99 / seconds
    meter._own -= 10_000.0  # ours
    assert meter.read()["cores_of_others"] == 0


@pytest.mark.parametrize(("others", "is_said"), [(0.0, False), (0.39, False), (0.41, True)])
def test_load_is_said_first(others: float, is_said: bool) -> None:
    machine: dict[str, Any] = {"cores_of_others": others, "num_logical_cores": 4}
    assert bool(load_warning(machine)) == is_said
    page = Report(title="t", sections=[], intro="i", environment=machine)
    assert page.markdown().split("\n\n")[1].startswith("**Other programs used 0.4 of 4 cores" if is_said else "i")
    assert ("Other programs" in page.html(Path())) == is_said
