"""Damaged files of a tokenizer are refused by their name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharesd.models.gguf.convert import converted_folder
from sharesd.models.tokenizer import load_tokenizer
from tests.cases.inputs import backend
from tests.helpers.gguf_files import write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": 7},
        {"chat_template": [["default", "x"]]},
        {"chat_template": [{"name": "default", "template": []}]},
        {"chat_template": [{"name": "default"}]},
        {"bos_token": {"content": "<|begin|>", "lstrip": {}}},
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"x": {"content": "<one>"}}},
        {"added_tokens_decoder": {"1": {"content": "<one>", "special": "yes"}}},
    ],
)
def test_values_of_wrong_types(config: dict[str, Any], folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json.* (download .* again)"):
        load_tokenizer(folder)


@pytest.mark.parametrize("added", [{"<one>": "500"}, {"<one>": None, "<two>": -1}, {"<one>": [1]}])
def test_added_tokens_without_ids(added: dict[str, Any], folder: Path) -> None:
    (folder / "added_tokens.json").write_text(json.dumps(added))
    with pytest.raises(ValueError, match=r"added_tokens\.json is not a map of tokens and ids"):
        load_tokenizer(folder)


def test_a_template_that_is_not_utf8(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: .* can't decode byte 0xff"):
        load_tokenizer(folder)


def test_a_damaged_template_names_its_folder(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %")
    tokenizer = load_tokenizer(folder)
    with pytest.raises(ValueError, match=f"chat template of {folder} refuses these messages"):
        tokenizer.ask("why")


@pytest.mark.parametrize("text", ["", "[]", '{"model": {"type": "BPE"}}', '{"a":' * 10_000, "\0"])
def test_a_damaged_tokenizer(text: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_a_damaged_template_is_that_of_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the folder in the cache that a file was converted to."""
    write_gguf(tmp_path / "model.gguf")
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    folder = converted_folder(tmp_path / "model.gguf", dequantize=False)
    (folder / "chat_template.jinja").write_text("{% for m in messages %")
    tokenizer = load_tokenizer(folder, tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=f"chat template of {tmp_path}/model.gguf refuses these messages"):
        tokenizer.ask("why")
