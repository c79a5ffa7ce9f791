"""Errors of loading as the person sees them who has to mend something: the value, and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import sharesd_command
from sharesd.cli.console import describe
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.loader import load_model
from sharesd.models.tokenizer import load_tokenizer
from tests.helpers.tiny_models import make_checkpoint

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
MISFIT = "give the config.json that the weights were saved with"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of the native decoder, and one of the fallback."""
    native = make_checkpoint(tmp_path_factory.mktemp("good") / "native")
    fallback = native.parent / "fallback"
    shutil.copytree(native, fallback)
    config = hf.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=384, n_positions=64)
    hf.GPT2LMHeadModel(config).save_pretrained(fallback)
    return {"native": native, "fallback": fallback}


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pointer": (
        lambda folder: (folder / "model.safetensors").write_text(POINTER),
        "model.safetensors is a pointer of Git LFS; run `git lfs pull`",
    ),
    "other sizes": (
        lambda folder: change(folder, hidden_size=128, n_embd=48),
        rf"\.weight has shape .* where config.json asks for .*; {MISFIT}|\.bias has shape .*; {MISFIT}",
    ),
    "more layers": (
        lambda folder: change(folder, num_hidden_layers=3, n_layer=3),
        rf"missing model.layers.2.*; {MISFIT}|lacks weights of 'gpt2': transformer.h.2.*; download it again",
    ),
    "own code": (
        lambda folder: change(folder, model_type="own", auto_map={"AutoModelForCausalLM": "modeling_own.Own"}),
        "brings code of its own, for model_type 'own'; read it, and add --trust-remote-code",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "has no weights; give the folder that has model.safetensors or pytorch_model.bin",
    ),
}


@pytest.mark.parametrize("kind", ["native", "fallback"])
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint(case: str, kind: str, good: dict[str, Path], tmp_path: Path) -> None:
    damage, message = CASES[case]
    folder = tmp_path / "checkpoint"
    shutil.copytree(good[kind], folder)
    damage(folder)
    with pytest.raises(ValueError, match=message) as failed:
        load_model(folder, dtype=torch.float32, device="cpu")
    assert str(folder) in describe(failed.value) and "\n" not in describe(failed.value)


def test_a_folder_without_a_tokenizer(good: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(good["native"], folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no file of a tokenizer; add its tokenizer.json"):
        load_tokenizer(folder)


def test_a_gguf_file_that_is_a_pointer(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text(POINTER)
    with pytest.raises(ValueError, match="model.gguf is a pointer of Git LFS; run `git lfs pull`"):
        converted_folder(file)


def test_windows_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sharesd_command.os.name", "nt")
    try:
        assert sharesd_command.main(["generate", "hello"]) == 2
    finally:
        monkeypatch.undo()
    assert capsys.readouterr().err.startswith("error: ShareSD does not run on Windows; use Linux or WSL 2")
