"""The programs in `examples` run, on a tiny model."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from serve.command import load_model
from sharesd.config import EngineConfig
from sharesd.drafters import registry
from tests.helpers.paths import ROOT
from tests.helpers.served_model import served
from tests.helpers.tiny_models import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the file that the test is named after."""
    name = request.node.name.removeprefix("test_")
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look types up
    spec.loader.exec_module(module)
    return module


def test_minimal_speculation(example: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(["the cat", "--target", str(folder), "--max-new-tokens", "24"])
    text, passes, same = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"plain decoding: (\d+) passes of the target; with drafts: (\d+)", passes)
    assert text and found and int(found[1]) == 23 and int(found[2]) < 20 and same == "the same text: True"
    model, _ = example.load(str(folder))
    cache, new = model.new_cache(1, 16), example.accept([5, 6, 7], [5, 6, 8, 9])
    assert new == [5, 6, 8] and example.accept([], [3]) == [3] and example.accept([1], [1, 2]) == [1, 2]
    with torch.inference_mode():
        root = example.prefill(model, cache, [1, 2, 3])
    assert cache.lengths.tolist() == [3] and 0 <= root < model.vocab_size


def test_own_drafter(
    example: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_added", {})
    example.main(str(folder))
    assert capsys.readouterr().out.splitlines()[-1].endswith("the same text: True")


def test_server_client(example: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(target=str(folder), mode="suffix", max_batch=2, max_context=256)
    with served(partial(load_model, config, "suffix", None), settings={"model_name": "tiny"}) as running:
        running.wait(lambda: running.http.get("/health").status_code == 200, 60)
        example.main(running.url)
    streamed, parsed = capsys.readouterr().out.rstrip("\n").rsplit("\n", 1)
    assert streamed and parsed.startswith("{'colours': [")


def test_batch_file(example: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(str(folder)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines if line.startswith("question-")] == [
        "question-0",
        "question-1",
        "question-2",
    ]
