"""Native checkpoints run without transformers, hqq, bitsandbytes and matplotlib: importing any of them fails here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

from sharesd.models.loader import decoder_config
from tests.helpers.paths import ROOT
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint

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
from sharesd.runtime import Runtime

target, *heads = sys.argv[1:]
config = sharesd.EngineConfig(target=target, device="cpu", max_context=128, heads=tuple(heads), num_draft=3)
params = sharesd.SamplingParams(max_new_tokens=16)
modes = ("naive", "share", "classic", "eagle", "parallel", "glide", "ngram", "suffix", "recycle", "hybrid")
runtime = Runtime(config, modes)
texts = {mode: runtime.engine(mode).generate(["the cat sat on the"], params)[0].token_ids for mode in modes}
assert len(set(map(str, texts.values()))) == 1, texts
print(len(texts), "modes")
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("light") / "tiny")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which Python starts with the blocker."""
    folder = tmp_path_factory.mktemp("blocker")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}


def run(environment: dict[str, str], *arguments: str | Path, stdin: str = "") -> str:
    """Output of Python."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_blocker_blocks(environment: dict[str, str]) -> None:
    for name in HEAVY:
        command = [sys.executable, "-c", f"import {name}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 1 and f"{name} is blocked" in done.stderr


def test_generate_runs_without_them(checkpoint: Path, environment: dict[str, str]) -> None:
    flags = ["--target", checkpoint, "--max-new-tokens", "8", "--mode", "hybrid"]
    assert run(environment, "-m", "sharesd", "generate", "the cat", *flags).strip()


def test_a_runtime_of_all_modes_runs_without_them(
    checkpoint: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    sizes = {"dtype": torch.bfloat16, "mlp": 64, "ids": range(0, 384, 3)}
    for kind in ("eagle3", "parallel", "glide"):
        make_head(tmp_path / kind, decoder_config(checkpoint), kind, **sizes)  # type: ignore[arg-type]
    heads = [tmp_path / kind for kind in ("eagle3", "parallel", "glide")]
    assert run(environment, "-c", RUNTIME, checkpoint, *heads) == "10 modes\n"


@pytest.mark.slow
def test_chat_runs_without_them(checkpoint: Path, environment: dict[str, str]) -> None:
    flags = ["--target", checkpoint, "--max-new-tokens", "8", "--mode", "share"]
    assert run(environment, "-m", "sharesd", "chat", *flags, stdin="the cat\n/mode suffix\nthe dog\n/stats\n").strip()


@pytest.mark.slow
def test_the_server_runs_without_them(checkpoint: Path, environment: dict[str, str], tmp_path: Path) -> None:
    flags = ["--target", str(checkpoint), "--mode", "share", "--port", "0", "--max-context", "128"]
    command, errors = [sys.executable, "-m", "serve", *flags], tmp_path / "stderr"
    with errors.open("w") as stderr:
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        while server.poll() is None and not is_ready(url):
            time.sleep(0.1)
        assert server.poll() is None, errors.read_text()[-3000:]
        body = json.dumps({"prompt": "the cat", "max_tokens": 8}).encode()
        request = Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0


def is_ready(url: str) -> bool:
    """True once the model is loaded."""
    try:
        with urlopen(f"{url}/health", timeout=60) as answer:
            return answer.status == 200
    except HTTPError:
        return False
