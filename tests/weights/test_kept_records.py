"""Records that later starts map: the same texts, without reading or repacking weights; and what is kept of heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile import block_linear
from sharesd import LLM, EngineConfig, QuantConfig, SamplingParams
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.startup import target as loading
from sharesd.weights import quantize
from sharesd_files import cache_root
from tests.helpers.gguf_files import write_gguf
from tests.helpers.quantized_folders import write_quantized
from tests.helpers.same_texts import PROMPTS
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))


def texts(target: Any, **options: Any) -> list[list[int]]:
    with LLM(str(target), modes=("naive",), max_context=64, **options) as llm:
        return [each.token_ids for each in llm.generate(PROMPTS, PARAMS)]


def kept() -> Path:
    (file,) = (cache_root() / "records").iterdir()
    return file


@pytest.fixture
def repacked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls, call = list[str](), block_linear.call

    def count(name: str, *rest: Any) -> None:
        calls.extend([name] * (name == "repack_blocks"))
        call(name, *rest)

    monkeypatch.setattr(block_linear, "call", count)
    return calls


TARGETS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "folder": (lambda folder: write_quantized(folder / "model", "awq"), {}),
    "another order": (lambda folder: write_quantized(folder / "model", "gptq act order"), {"dequantize": False}),
    "quantized at load": (lambda folder: make_checkpoint(folder / "model"), {"target_quant": "q8_0"}),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_second_start_maps_the_records(kind: str, tmp_path: Path, repacked: list[str]) -> None:
    write, options = TARGETS[kind]
    target = write(tmp_path)
    first = texts(target, **options)
    assert repacked
    repacked.clear()
    assert texts(target, **options) == first and not repacked


@pytest.mark.slow
def test_a_file_that_does_not_fit_is_written_again_and_weights_that_changed_are_read(
    tmp_path: Path, repacked: list[str]
) -> None:
    target = write_gguf(tmp_path / "a.gguf")
    first, whole = texts(target), kept().read_bytes()
    repacked.clear()
    assert texts(target) == first and not repacked
    for damaged in (whole[:-1], whole.replace(b'"key"', b'"kez"', 1), b"", b"\xff\n" + whole):
        kept().write_bytes(damaged)
        repacked.clear()
        assert texts(target) == first and repacked and kept().read_bytes() == whole
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    repacked.clear()
    texts(target)
    assert repacked


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, repacked: list[str], caplog: Any) -> None:
    target = write_gguf(tmp_path / "a.gguf")
    cache_root().mkdir(parents=True, exist_ok=True)
    (cache_root() / "records").write_text("a file in its place")
    assert texts(target) and repacked
    assert "put into the order of the kernels at each start" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.bogus": torch.ones(1)}, "unexpected fc.bogus"),
        ({"fc.weight": torch.ones(3, 3)}, "fc.weight has shape"),
        ({"layers.0.mlp.up_proj.weight": None}, "missing layers.0.mlp.up_proj.weight"),
        ({"layers.0.mlp.up_proj.weight": torch.ones(48, 64, dtype=torch.int32)}, "up_proj.weight is int32"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_the_target_is_read(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_checkpoint(tmp_path / "base")
    head = make_head(tmp_path / "head", decoder_config(base), "eagle")
    tensors = load_file(head / "model.safetensors") | change
    save_file({name: each for name, each in tensors.items() if each is not None}, head / "model.safetensors")
    monkeypatch.setattr(loading, "load_model", None)
    with pytest.raises(ValueError, match=message) as caught:
        Runtime(EngineConfig(target=str(base), mode="eagle", heads=(str(head),), device="cpu", max_context=64))
    assert str(head) in str(caught.value)


def test_kept_codes_of_a_head_are_those_of_one_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since a head may quantize rows of its target's LM head."""
    head, one, two = (make_checkpoint(tmp_path / name) for name in ("head", "one", "two"))
    monkeypatch.setattr(quantize, "quantize_linears", quantized := Mock())
    options: dict[str, Any] = {
        "device": torch.device("cpu"),
        "build": lambda *args: None,
        "progress": lambda *args: None,
    }
    for folder in (one, two):
        quantize.ModelQuantizer(QuantConfig(), folder=folder, **options).head(torch.nn.Module(), QuantConfig(), head)
    found = [call.kwargs["solver_config"].identity for call in quantized.call_args_list]
    assert None not in found and len(set(found)) == 2
