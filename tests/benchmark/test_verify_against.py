"""`sharesd verify --against`: the divergence from a reference, as transformers computes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmark.studies import divergence
from sharesd.models.tokenizer import load_tokenizer
from sharesd_command import main
from tests.helpers.block_parts import ggml_type
from tests.helpers.gguf_files import write_gguf
from tests.helpers.tiny_models import make_checkpoint

TEXT = "What is heard is not what was said, and what was said was not heard. " * 9


@pytest.fixture(autouse=True)
def short_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(divergence, "_WINDOW", 100)
    monkeypatch.setattr(divergence, "_PIECE", 40)


def against(target: Path, reference: Path, out: Path, *options: str) -> dict[str, Any]:
    given = ["--target", str(target), "--against", str(reference), "--out-dir", str(out)]
    assert main(["verify", *given, *options]) == 0
    return json.loads((out / "verify.json").read_text())["divergence"]


@torch.inference_mode()
def log_probs(model: Any, text: list[int]) -> Tensor:
    windows = [torch.tensor([text[first : first + 100]]) for first in range(0, len(text), 100)]
    return torch.cat([model(window).logits[0].double().log_softmax(-1) for window in windows])


def test_it_is_the_divergence_that_transformers_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, texts = make_checkpoint(tmp_path / "model"), tmp_path / "texts.txt"
    texts.write_text(TEXT)
    found = against(folder, folder, tmp_path / "out", "--target-quant", "q4_0", "--texts", str(texts))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = load_tokenizer(folder).encode(TEXT)
    wanted = log_probs(model, ids)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            kind = ggml_type("Q8_0" if name == "lm_head.weight" else "Q4_0")
            values = gguf.dequantize(gguf.quantize(parameter.detach().numpy(), kind), kind)
            parameter.data.copy_(torch.from_numpy(values.copy()))
    ours = log_probs(model, ids)
    kl = (wanted.exp() * (wanted - ours)).sum(-1)
    assert found["num_positions"] == len(ids) > 200
    assert found["mean"] == pytest.approx(float(kl.mean()), rel=1e-3) and found["mean"] > 1e-4
    assert found["percentile_99"] == pytest.approx(float(kl.quantile(0.99)), rel=1e-2)
    assert found["max"] == pytest.approx(float(kl.max()), rel=1e-2)
    assert found["same_argmax"] == pytest.approx(
        float((ours.argmax(-1) == wanted.argmax(-1)).double().mean()), abs=0.01
    )
    assert f"{found['mean']:.3g}" in capsys.readouterr().out


def test_stored_weights_are_close_to_their_values(tmp_path: Path) -> None:
    file, texts = write_gguf(tmp_path / "a.gguf"), tmp_path / "texts.txt"
    texts.write_text(TEXT)
    exact = against(file, file, tmp_path / "exact", "--texts", str(texts))
    fast = against(file, file, tmp_path / "fast", "--texts", str(texts), "--activations", "fast")
    assert exact["num_positions"] == fast["num_positions"] > 20
    assert exact["mean"] < 1e-6 < 10 * fast["mean"] and exact["mean"] < fast["mean"]
    assert exact["same_argmax"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--texts", "t"], "--texts is t, which only --against reads; add --against"),
        (["--against", "nowhere/at-all/x"], "nowhere/at-all/x does not exist"),
        (["--against", "{model}", "--texts", "{model}/none"], "none cannot be read .*use a text in UTF-8"),
        (["--against", "{other}"], "vocabular"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = make_checkpoint(tmp_path / "model"), write_gguf(tmp_path / "other.gguf")
    given = [option.format(model=folder, other=other) for option in options]
    assert main(["verify", "--target", str(folder), "--out-dir", str(tmp_path / "out"), *given]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "out" / "verify.json").exists()
