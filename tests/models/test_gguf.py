"""Conversion of .gguf files, against that of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version

from sharesd.models import rope
from sharesd.models.architectures import architecture_of
from sharesd.models.decoder_config import DecoderConfig, UnsupportedArchitecture
from sharesd.models.gguf import convert
from sharesd.models.gguf.config import config_of
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.gguf.reader import StoredTensor, read_gguf
from sharesd.models.gguf.tokenizer import check_tokenizer
from sharesd.models.gguf.weights import write_weights
from sharesd.models.loader import load_model
from sharesd.models.tokenizer import load_tokenizer
from tests.helpers.gguf_files import write_gguf
from tests.models.test_weights import weights_of

TEXTS = (
    "the thing is that it is in 1 of 42 boxes, <|im_end|>and\n\n  on — to the für 日本",
    " that's it:\tthe\r\n\n\n    of <b>and</b>  THE x1234567",
    "",
    "  ",
)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def both_ways(file: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folders of our conversion and of that by transformers."""
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(file.parent / "theirs"))
    with monkeypatch.context() as patch:

        def refuse(*args: object) -> None:
            raise UnsupportedArchitecture("a test")

        patch.setattr(convert, "_convert_here", refuse)
        theirs = converted_folder(file)
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(file.parent / "ours"))
    with monkeypatch.context() as patch:
        patch.delattr(convert, "_convert_by_transformers")
        return converted_folder(file), theirs


@pytest.mark.parametrize(
    ("name", "pre"),
    [
        ("llama", "smollm"),
        ("llama", "llama-bpe"),
        ("llama", "spm"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen2"),
        ("phi3", "spm"),
        ("gemma2", "spm"),
        ("gemma3", "spm"),
    ],
)
def test_conversion_equals_that_of_transformers(
    name: str, pre: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = both_ways(write_gguf(tmp_path / "tiny.gguf", name, pre), monkeypatch)
    a, b = weights_of(ours), weights_of(theirs)
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

    one, two = (DecoderConfig.from_hf(json.loads((folder / "config.json").read_text())) for folder in (ours, theirs))
    not_theirs = (
        ("layer_types", "attention_multiplier") if name.startswith("gemma") else ()
    )  # they take 256 for the size of heads
    for field in set(DecoderConfig.__slots__) - {"rope_parameters", "eos_ids", *not_theirs}:
        assert getattr(one, field) == getattr(two, field), field
    assert [r["rope_theta"] for r in one.rope_parameters] == [r["rope_theta"] for r in two.rope_parameters]
    if not_theirs:
        assert one.layer_types == two.layer_types and one.attention_multiplier == 16**-0.5

    mine, other = load_tokenizer(ours), load_tokenizer(theirs)
    assert mine.eos_ids == other.eos_ids == (2,)
    if pre in ("smollm", "llama-bpe", "spm") and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("transformers made other tokenizers of such files before 5.23")
    for text in TEXTS:
        assert mine.encode(text) == other.encode(text)
        assert mine.decode(mine.encode(text), False) == other.decode(other.encode(text), False)
    message = [{"role": "user", "content": "on it"}]
    assert mine.chat(message) == other.chat(message)
    assert load_model(ours, dtype=torch.float32, device="cpu").name.endswith("(native)")


def test_other_files_go_through_transformers(tmp_path: Path, own_cache: Path) -> None:
    folder = converted_folder(write_gguf(tmp_path / "qwen.gguf", architecture="qwen2", pre="unheard-of"))
    assert load_model(folder, dtype=torch.float32, device="cpu").name == "qwen2 (native)"
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("the of and")) == "the of and"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"expert_count": 8}, "field 'llama.expert_count' is not known"),
        ({"attention.value_length": 8}, "heads of several sizes"),
        ({"rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not known"),
    ],
)
def test_what_is_not_known_is_named(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf", extra=extra))
    with pytest.raises(UnsupportedArchitecture, match=message):
        config_of(file)


def test_unknown_tensors_and_tokenizers_are_named(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf", pre="unheard-of"))
    with pytest.raises(UnsupportedArchitecture, match="'unheard-of'"):
        check_tokenizer(file)
    layout = architecture_of("llama").gguf
    assert layout is not None
    for name in ("blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight", "mystery"):
        with pytest.raises(UnsupportedArchitecture, match=name):
            layout.checkpoint_name(name)


def test_stretched_positions_are_read(tmp_path: Path) -> None:
    extra = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    config = config_of(read_gguf(write_gguf(tmp_path / "tiny.gguf", extra=extra)))
    read = DecoderConfig.from_hf(config)
    assert (
        read.rope_parameters[0]["rope_type"] == "linear"
        and read.rope_parameters[0]["factor"] == 4.0
        and read.max_context == 256
    )


def test_the_divisors_of_llama_3_become_its_rope(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 32.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    wanted, _ = rope.frequencies(llama3, 16, 64)
    plain, _ = rope.frequencies({"rope_type": "default", "rope_theta": 10_000.0}, 16, 64)
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf"))

    def add(divisors: np.ndarray) -> None:
        kind, name = gguf.GGMLQuantizationType.F32, "rope_freqs.weight"
        file.tensors[name] = StoredTensor(name, divisors.shape, kind, divisors.view("u1"))

    add((plain / wanted).numpy())
    config = config_of(file)
    assert config["rope_scaling"] | {"rope_theta": 10_000.0} == llama3
    add(np.linspace(1, 3, 8, dtype=np.float32))
    with pytest.raises(UnsupportedArchitecture, match="rope_freqs.weight"):
        config_of(file)


def test_weights_do_not_depend_on_blocks_and_report_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf"))
    steps: list[tuple[str, int, int]] = []
    heads = {"attn_q": 4, "attn_k": 2}
    write_weights(file, heads, tmp_path / "whole.safetensors", lambda *step: steps.append(step))
    monkeypatch.setattr("sharesd.models.gguf.weights._BLOCK_WEIGHTS", 96)
    write_weights(file, heads, tmp_path / "parts.safetensors", lambda *step: steps.append(step))
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "parts.safetensors").read_bytes()
    done = [step[1] for step in steps if step[0] == "converting weights"]
    assert len(done) > 100 and steps[-1] == ("writing weights", 1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"GGML" + raw[4:], "does not begin with GGUF"),
        (lambda raw: raw[:4] + b"\x09" + raw[5:], "version is 9"),
        (lambda raw: raw[:100], "not a readable GGUF file"),
        (lambda raw: raw[:-100], "ends before the end of tensor"),
        (lambda raw: b"", "not a readable GGUF file"),
    ],
    ids=["magic", "version", "header", "data", "empty"],
)
def test_damaged_files_are_refused(change, message: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=message):
        read_gguf(file)
