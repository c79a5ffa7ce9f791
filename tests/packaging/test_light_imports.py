"""Native checkpoints run without transformers, hqq, bitsandbytes, matplotlib; what needs a missing package says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.command import main as serve
from sharesd.data import grammar_spec
from sharesd.models.loader import decoder_config
from sharesd.reports.pictures import can_draw
from tests.helpers.paths import ROOT
from tests.helpers.tiny_heads import make_head
from tests.packaging.test_deploy import ask, running
from train.heads.metrics_log import CURVES, LOG, MetricsLog

HEAVY = ("transformers", "hqq", "bitsandbytes", "matplotlib")
BLOCKER = f"""
import sys

class Blocker:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocker)
"""
RUNTIME = """
import sys

import sharesd

target, *heads = sys.argv[1:]
config = sharesd.EngineConfig(target=target, device="cpu", max_context=128, heads=tuple(heads), num_draft=3)
params = sharesd.SamplingParams(max_new_tokens=16)
modes = ("naive", "share", "classic", "eagle", "parallel", "glide", "ngram", "suffix", "recycle", "hybrid")
llm = sharesd.LLM.from_config(config, modes)
for mode in modes:
    llm.runtime.warm_up(mode)
texts = {mode: llm.generate("the cat sat on the", params, mode=mode)[0].token_ids for mode in modes}
assert len(set(map(str, texts.values()))) == 1, texts
print(len(texts), "modes")
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which Python starts with the blocker."""
    folder = tmp_path_factory.mktemp("blocker")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}


def run(environment: dict[str, str], *arguments: str | Path, stdin: str = "") -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_blocker_blocks(environment: dict[str, str]) -> None:
    for name in HEAVY:
        command = [sys.executable, "-c", f"import {name}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 1 and f"{name} is blocked" in done.stderr


def test_generate_runs_without_them(tiny: Path, environment: dict[str, str]) -> None:
    flags = ["--target", tiny, "--max-new-tokens", "8", "--mode", "hybrid"]
    assert run(environment, "-m", "sharesd", "generate", "the cat", *flags).strip()


def test_a_runtime_of_all_modes_runs_without_them(tiny: Path, environment: dict[str, str], tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "mlp": 64, "ids": range(0, 384, 3)}
    kinds = ("eagle3", "parallel", "glide")
    heads = [make_head(tmp_path / kind, decoder_config(tiny), kind, **sizes) for kind in kinds]
    assert run(environment, "-c", RUNTIME, tiny, *heads) == "10 modes\n"


@pytest.mark.slow
def test_chat_runs_without_them(tiny: Path, environment: dict[str, str]) -> None:
    flags = ["--target", tiny, "--max-new-tokens", "8", "--mode", "share"]
    assert run(environment, "-m", "sharesd", "chat", *flags, stdin="the cat\n/mode suffix\nthe dog\n/stats\n").strip()


@pytest.mark.slow
def test_the_server_runs_without_them(tiny: Path, environment: dict[str, str], tmp_path: Path) -> None:
    flags = ["--target", str(tiny), "--mode", "share", "--port", "0", "--max-context", "128"]
    with running([sys.executable, "-m", "serve", *flags], tmp_path, **environment) as url:
        status, answer = ask(f"{url}/v1/completions", {"prompt": "the cat", "max_tokens": 8})
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 8


def curves(folder: Path, steps: int) -> Path:
    """The picture of a training that was drawn after each step, if it could be."""
    log = MetricsLog(folder, -1)
    for step in range(steps):
        log.add(step, loss=1.0)
        log.draw()
    log.close()
    return folder / CURVES


def test_without_matplotlib_it_is_said_once_and_records_stay(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not can_draw("speed.png", "acceptance.png")
    line = "speed.png and acceptance.png: not drawn, matplotlib is not installed; run: pip install matplotlib\n"
    assert capsys.readouterr().err == line
    assert not curves(tmp_path, 2).exists() and len((tmp_path / LOG).read_text().splitlines()) == 2
    assert capsys.readouterr().err.count(f"{CURVES}: not drawn") == 1


def test_with_matplotlib_curves_are_drawn_and_nothing_is_said(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    assert can_draw("speed.png")
    assert curves(tmp_path, 1).stat().st_size > 10_000 and not capsys.readouterr().err


def test_the_server_and_grammars_name_their_packages(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setitem(sys.modules, "serve.server", None)
    assert serve(["--port", "0"]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "run: pip install fastapi uvicorn prometheus-client llguidance" in said
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match="run: pip install llguidance"):
        grammar_spec.llguidance()
