"""Files and folders that are no language model: one line says what it is, what was found and what helps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sharesd.cli.main import main
from sharesd.models.checkpoint import read_tensors
from tests.helpers.gguf_files import write_gguf
from tests.helpers.tiny_models import make_checkpoint

Make = Callable[[Path], Path]


def config(**fields: Any) -> Make:
    def make(folder: Path) -> Path:
        file = make_checkpoint(folder / "model") / "config.json"
        said = {name: value for name, value in (json.loads(file.read_text()) | fields).items() if value is not None}
        file.write_text(json.dumps(said))
        return file.parent

    return make


def quantized(**section: Any) -> Make:
    return config(quantization_config=section)


def mlx(folder: Path, *copies: str) -> Path:
    """As mlx-lm converts: packed words, and scales and biases of groups."""
    model = config(**{name: {"group_size": 64, "bits": 4} for name in ("quantization", *copies)})(folder)
    tensors = load_file(model / "model.safetensors")
    for name, weight in [(name, weight) for name, weight in tensors.items() if weight.ndim > 1]:
        base, (N, K) = name.removesuffix("weight"), weight.shape
        tensors[name] = torch.zeros(N, K // 8, dtype=torch.int32).view(torch.uint32)
        tensors |= {base + plane: torch.ones(N, K // 64) for plane in ("scales", "biases")}
    save_file(tensors, model / "model.safetensors", metadata={"format": "mlx"})
    return model


def ggufs(architecture: str, kind: str | None = None) -> Make:
    """A file of other contents than a model: one small tensor."""

    def make(folder: Path) -> Path:
        writer = gguf.GGUFWriter(folder / "it.gguf", architecture)
        if kind is not None:
            writer.add_string("general.type", kind)
        writer.add_tensor("some.weight", np.zeros((4, 4), np.float32))
        return written(writer, folder / "it.gguf")

    return make


def written(writer: gguf.GGUFWriter, file: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def vocabulary(folder: Path) -> Path:
    """As llama.cpp's `--vocab-only` writes: sizes and tokenizer, without tensors."""
    whole = gguf.GGUFReader(write_gguf(folder / "whole.gguf"))
    writer = gguf.GGUFWriter(folder / "vocab.gguf", "llama")
    for key, field in whole.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    return written(writer, folder / "vocab.gguf")


def raw(name: str, content: bytes) -> Make:
    def make(folder: Path) -> Path:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        return folder / name

    return make


def without(name: str, more: str | None = None) -> Make:
    def make(folder: Path) -> Path:
        model = make_checkpoint(folder / "model")
        (model / name).unlink()
        return model if more is None else raw(more, b"x")(model).parents[more.count("/")]

    return make


CASES: dict[str, tuple[Make, tuple[str, ...]]] = {
    "mlx": (mlx, ("quantized by MLX", "4 bits in groups of 64", "give the original checkpoint")),
    "mlx twice": (lambda at: mlx(at, "quantization_config"), ("quantized by MLX", "give the original checkpoint")),
    "adapter.gguf": (ggufs("llama", "adapter"), ("LoRA adapter", "general.type", "base model")),
    "mmproj": (ggufs("clip", "mmproj"), ("image projector", "give the .gguf file of the language model")),
    "clip": (ggufs("clip"), ("image projector", "general.architecture = clip")),
    "imatrix": (ggufs("", "imatrix"), ("importance matrix", "give the .gguf file of a language model")),
    "control vector": (ggufs("controlvector"), ("control vector", "give the .gguf file of a language model")),
    "vocabulary": (vocabulary, ("vocabulary alone", "no tensors", "give the .gguf file of a language model")),
    "whisper.gguf": (ggufs("whisper"), ("architecture 'whisper'", "give a safetensors checkpoint")),
    "no tokenizer.gguf": (ggufs("llama"), ("no tokenizer (tokenizer.ggml.model)", "give a file with one")),
    "a part": (raw("m-00001-of-00002.gguf", b""), ("it is empty", "download it again")),
    "page": (raw("m.gguf", b"<!DOCTYPE html>"), ("page of the web", "download the file itself")),
    "ggml": (raw("m.gguf", b"tjgg" + bytes(99)), ("before GGUF", "give a .gguf file")),
    "pointer": (raw("m.gguf", b"version https://git-lfs\n"), ("is a pointer of Git LFS; run `git lfs pull`",)),
    "big-endian": (raw("m.gguf", b"GGUF\0\0\0\3" + bytes(99)), ("big-endian", "gguf-convert-endian")),
    "empty": (lambda at: at, ("is empty", "correct the path")),
    "diffusers": (
        lambda at: raw("model_index.json", b'{"_class_name": "Pipeline"}')(at).parent,
        ("diffusers", "give the folder of a language"),
    ),
    "adapter": (
        lambda at: raw("adapter_config.json", b'{"base_model_name_or_path": "org/base"}')(at).parent,
        ("is a LoRA adapter", "give org/base as --target, and this folder as --lora"),
    ),
    "folder above": (lambda at: make_checkpoint(at / "model").parent, ("no config.json, only model", "/model")),
    "onnx": (without("model.safetensors", "onnx/model.onnx"), ("only onnx/model.onnx (ONNX)", "give the folder")),
    "flax": (without("model.safetensors", "flax_model.msgpack"), ("flax_model.msgpack (Flax)", "give the folder")),
    "meta": (without("model.safetensors", "consolidated.00.pth"), ("Meta's own format", "give the folder")),
    "bad torch": (without("model.safetensors", "pytorch_model.bin"), ("not a file of torch", "download it again")),
    "no tokenizer": (without("tokenizer.json"), ("/model has no file of a tokenizer", "add its tokenizer.json")),
    "weights": (lambda at: make_checkpoint(at / "m") / "model.safetensors", ("file of weights", "give its folder")),
    "config": (lambda at: make_checkpoint(at / "m") / "config.json", ("one file of a checkpoint", "give its folder")),
    "zip": (raw("model.zip", b"PK\5\6" + bytes(18)), ("is an archive", "unpack it")),
    "unknown": (config(model_type="foobar"), ("architecture 'foobar'", "install a newer transformers")),
    "no type": (config(model_type=None), ("no model_type", "download the checkpoint again")),
    "bert": (config(model_type="bert", architectures=["BertModel"]), ("it is a BertModel", "give a language model")),
    "t5": (config(model_type="t5"), ("architecture 't5'", "an encoder", "give a decoder-only")),
    "no method": (quantized(bits=4), ("no quantization_config.quant_method", "give a checkpoint quantized otherwise")),
    "aqlm": (quantized(quant_method="aqlm"), ("quant_method = aqlm", "give a checkpoint quantized otherwise")),
    "5 bits": (quantized(quant_method="gptq", bits=5), ("bits = 5", "give a checkpoint quantized otherwise")),
    "plain": (quantized(quant_method="gptq", bits=4, group_size=64), ("is not quantized", "give the config.json")),
}


SLOW = ("whisper.gguf", "bert")  # they import more of transformers


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_a_refusal_is_one_line(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, said = CASES[case]
    target = make(tmp_path)
    capfd.readouterr()
    status = main(["generate", "the", "--raw", "--target", str(target), "--mode", "naive", "--max-new-tokens", "2"])
    out, err = capfd.readouterr()
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err
    assert [part for part in said if part not in err] == [], err


def test_torch_files_of_before_version_1_6_are_read(tmp_path: Path) -> None:
    """They are no archives, and cannot be mapped."""
    tensors = {"a": torch.arange(6.0).view(2, 3)}
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(dict(read_tensors(tmp_path / "pytorch_model.bin"))["a"], tensors["a"])
