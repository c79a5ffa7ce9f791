"""Damaged .gguf files, tokenizers, weight files, heads and adapters are refused by their names, and nothing is kept."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sharesd import LLM
from sharesd.drafters.heads.checkpoint import load_head
from sharesd.drafters.selection import head_mode
from sharesd.models.checkpoint import read_tensors
from sharesd.models.decoder import Decoder
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.loader import decoder_config
from sharesd.models.lora import folder_with_adapter
from sharesd.models.tokenizer import load_tokenizer
from tests.cases.inputs import backend, llama
from tests.helpers.damage import DEEP, GGUFHeader
from tests.helpers.gguf_files import write_gguf
from tests.helpers.tiny_heads import make_head
from tests.models.folders import edit_config


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("plain") / "x.gguf").read_bytes()


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
def test_fields(key: str, value: bytes, match: str, plain: bytes, own_cache: Path) -> None:
    header = GGUFHeader.read(plain)
    header.fields = [(name, old) for name, old in header.fields if name != key] + [(key, value)]
    refused(header, own_cache, match)


def test_a_key_twice(plain: bytes, own_cache: Path) -> None:
    header = GGUFHeader.read(plain)
    header.fields.append(header.fields[3])
    refused(header, own_cache, f"it has key '{header.fields[3][0]}' twice")


def test_weights_that_are_not_numbers(plain: bytes, own_cache: Path) -> None:
    header = GGUFHeader.read(plain)
    offset = next(offset for name, *_, offset in header.tensors if name == "blk.0.attn_q.weight")
    header.rest = header.rest[:offset] + struct.pack("<e", math.nan) + header.rest[offset + 2 :]
    refused(header, own_cache, "tensor 'blk.0.attn_q.weight' has NaN or infinite values")
    with pytest.raises(ValueError, match=r"x\.gguf: model\.layers\.0\.self_attn\.q_proj\.weight has NaN or infinite"):
        LLM(str(own_cache.parent / "x.gguf"), mode="naive", device="cpu", max_context=64)  # as it is stored


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


CONFIGS = (
    {"chat_template": 7},
    {"chat_template": [["default", "x"]]},
    {"chat_template": [{"name": "default", "template": []}]},
    {"chat_template": [{"name": "default"}]},
    {"bos_token": {"content": "<|begin|>", "lstrip": {}}},
    {"added_tokens_decoder": [1]},
    {"added_tokens_decoder": {"x": {"content": "<one>"}}},
    {"added_tokens_decoder": {"1": {"content": "<one>", "special": "yes"}}},
)
ADDED = ({"<one>": "500"}, {"<one>": None, "<two>": -1}, {"<one>": [1]})
TOKENIZERS = ("", "[]", "{}", '{"model": {"type": "BPE"}}', '{"a":' * 10_000, "\0")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("tokenizer_config.json", json.dumps(each), r"_config\.json.* (download .* again)") for each in CONFIGS),
        *(("added_tokens.json", json.dumps(each), r"_tokens\.json is not a map of tokens and ids") for each in ADDED),
        *(("tokenizer.json", text, r"tokenizer\.json is damaged") for text in TOKENIZERS),
        ("chat_template.jinja", "{{ messages }}\xff", r"\.jinja: .* can't decode byte 0xff"),
    ],
)
def test_damaged_files_are_refused_in_one_line(name: str, content: str, message: str, folder: Path) -> None:
    (folder / name).write_text(content, "latin-1")
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_a_damaged_template_names_its_folder(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %")
    with pytest.raises(ValueError, match=f"chat template of {folder} refuses these messages"):
        load_tokenizer(folder).ask("why")


@pytest.mark.usefixtures("own_cache")
def test_a_damaged_template_is_that_of_what_was_given(tmp_path: Path) -> None:
    """Not that of the folder in the cache that a file was converted to."""
    write_gguf(tmp_path / "model.gguf")
    folder = converted_folder(tmp_path / "model.gguf", dequantize=False)
    (folder / "chat_template.jinja").write_text("{% for m in messages %")
    tokenizer = load_tokenizer(folder, tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=f"chat template of {tmp_path}/model.gguf refuses these messages"):
        tokenizer.ask("why")


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"PK\3\4", {"a": 1}, [1]])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weight_files(name: str, content: Any, tmp_path: Path) -> None:
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(ValueError, match=f"{file} is damaged .*; download it again") as caught:
        list(read_tensors(file))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder(decoder_config(llama(tmp_path_factory.mktemp("target") / "model", seed=5)))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("parallel", {"draft_length": float("nan")}),
        ("parallel", {"draft_length": "4"}),
        ("eagle", {"architectures": 7}),
        ("eagle", {"model_type": "llamax"}),
        ("eagle", {"hidden_act": "sil"}),
        ("eagle", {"intermediate_size": 2**35}),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, "1"]}}),
        ("eagle3", {"eagle_config": 7}),
        ("eagle3", {"draft_vocab_size": -1}),
        ("glide", {"glide_config": {"target_layer_ids": {}}}),
    ],
)
def test_heads(kind: str, changes: dict[str, Any], target: Decoder, tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", target.config, kind)
    with pytest.raises(ValueError, match=str(folder)) as caught:
        load_head(edit_config(folder, **changes), target)
    assert "\n" not in str(caught.value)


def test_a_config_of_a_head_that_is_not_utf8(target: Decoder, tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", target.config, "eagle")
    (folder / "config.json").write_bytes(b'{"\xff')
    assert head_mode(str(folder)) == "eagle"
    with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
        load_head(folder, target)


@pytest.mark.parametrize("tensors", [{}, {"x": torch.ones(2, 2)}, {"q_proj.lora_A.weight": torch.ones(4, 64)}])
def test_adapters(tensors: dict[str, torch.Tensor], tmp_path: Path, own_cache: Path) -> None:
    base, adapter = llama(tmp_path / "base", seed=5), tmp_path / "tuned"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=f"adapter {adapter} "):
        folder_with_adapter(base, adapter)
    assert not own_cache.exists()
