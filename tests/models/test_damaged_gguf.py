"""Damaged headers of .gguf files are refused by the file's name, and nothing of them is kept."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest

from sharesd.models.gguf.convert import converted_folder
from tests.helpers.damage import DEEP, GGUFHeader
from tests.helpers.gguf_files import write_gguf


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("plain") / "x.gguf").read_bytes()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refused(header: GGUFHeader, cache: Path, match: str) -> None:
    file = cache.parent / "x.gguf"
    file.write_bytes(header.write())
    with pytest.raises(ValueError, match=match) as caught:
        converted_folder(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert not (cache / "checkpoints").exists() or not list((cache / "checkpoints").iterdir())


def whole(number: int) -> bytes:
    return struct.pack("<II", 4, number)


def text(value: str) -> bytes:
    return struct.pack("<IQ", 8, len(value)) + value.encode()


DEEP_ARRAY = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * DEEP + struct.pack("<IQ", 4, 0)
FLOAT = struct.pack("<If", 6, 0.5)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("general.alignment", whole(0), "general.alignment is 0"),
        ("general.alignment", text("x"), "general.alignment is x"),
        ("general.architecture", whole(7), "general.architecture is not a text"),
        ("llama.block_count", whole(2**32 - 1), "tensors for 4294967295 blocks"),
        ("llama.block_count", FLOAT, "llama.block_count is 0.5, not a number of this kind"),
        ("llama.context_length", whole(2**32 - 1), "positions, whose rope tables|has shape"),
        ("llama.feed_forward_length", whole(2**31), "asks for .* weights"),
        ("llama.attention.head_count", text("x"), "attention.head_count"),
        ("llama.unknown", DEEP_ARRAY, "recursion"),
        ("tokenizer.chat_template", whole(7), "tokenizer.chat_template"),
        ("tokenizer.ggml.tokens", struct.pack("<IIQ", 9, 4, 2**62), "not a readable GGUF file"),
        ("tokenizer.ggml.merges", whole(7), "tokenizer.ggml.merges"),
        ("tokenizer.ggml.bos_token_id", text("x"), "tokenizer.ggml.bos_token_id"),
        ("tokenizer.ggml.add_bos_token", text("x"), "tokenizer.ggml.add_bos_token"),
        ("split.count", text("x"), "split.count is x, not a number"),
        ("split.no", DEEP_ARRAY[:4] + struct.pack("<IQ", 4, 0), r"split.no is \[\], not a number"),
    ],
)
def test_fields(key: str, value: bytes, match: str, plain: bytes, cache: Path) -> None:
    header = GGUFHeader.read(plain)
    header.fields = [(name, old) for name, old in header.fields if name != key] + [(key, value)]
    refused(header, cache, match)


def test_a_key_twice(plain: bytes, cache: Path) -> None:
    header = GGUFHeader.read(plain)
    header.fields.append(header.fields[3])
    refused(header, cache, f"it has key '{header.fields[3][0]}' twice")


def test_weights_that_are_not_numbers(plain: bytes, cache: Path) -> None:
    header = GGUFHeader.read(plain)
    offset = next(offset for name, *_, offset in header.tensors if name == "blk.0.attn_q.weight")
    header.rest = header.rest[:offset] + struct.pack("<e", math.nan) + header.rest[offset + 2 :]
    refused(header, cache, "tensor 'blk.0.attn_q.weight' has NaN or infinite values")
