"""Records that later starts map: the same texts, without reading or repacking weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile import block_linear
from sharesd import LLM, SamplingParams
from sharesd_files import cache_root
from tests.helpers.gguf_files import write_gguf
from tests.helpers.quantized_folders import write_quantized
from tests.helpers.same_texts import PROMPTS
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
    """Calls of the kernel that repacks blocks."""
    calls, kernel = list[str](), block_linear.kernel

    def count(name: str, *types: Any) -> Any:
        calls.extend([name] * (name == "repack_blocks"))
        return kernel(name, *types)

    monkeypatch.setattr(block_linear, "kernel", count)
    return calls


TARGETS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "gguf": (lambda folder: write_gguf(folder / "a.gguf"), {}),
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


def test_a_file_that_does_not_fit_is_written_again(tmp_path: Path, repacked: list[str]) -> None:
    target = write_gguf(tmp_path / "a.gguf")
    first = texts(target)
    whole = kept().read_bytes()
    for damaged in (whole[:-1], whole.replace(b'"key"', b'"kez"', 1), b"", b"\xff\n" + whole):
        kept().write_bytes(damaged)
        repacked.clear()
        assert texts(target) == first and repacked and kept().read_bytes() == whole


def test_weights_that_changed_are_read(tmp_path: Path, repacked: list[str]) -> None:
    target = write_gguf(tmp_path / "a.gguf")
    texts(target)
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    repacked.clear()
    texts(target)
    assert repacked


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, repacked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    target = write_gguf(tmp_path / "a.gguf")
    cache_root().mkdir(parents=True, exist_ok=True)
    (cache_root() / "records").write_text("a file in its place")
    first = texts(target)
    assert "put into the order of the kernels at each start" in caplog.text
    assert texts(target) == first
