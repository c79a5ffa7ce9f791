"""Files and folders that are no language model: one line says what it is, what was found and what helps."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sharesd.cli.main import main
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


def mlx(copies: bool) -> Make:
    """As mlx-lm converts: packed words, and scales and biases of groups."""

    def make(folder: Path) -> Path:
        section = {"group_size": 64, "bits": 4}
        model = config(quantization=section, **({"quantization_config": section} if copies else {}))(folder)
        tensors = {}
        for name, weight in load_file(model / "model.safetensors").items():
            if weight.ndim == 1:
                tensors[name] = weight
                continue
            tensors[name] = torch.zeros(weight.shape[0], weight.shape[1] // 8, dtype=torch.int32).view(torch.uint32)
            for plane in ("scales", "biases"):
                tensors[f"{name.removesuffix('weight')}{plane}"] = torch.ones(weight.shape[0], weight.shape[1] // 64)
        save_file(tensors, model / "model.safetensors", metadata={"format": "mlx"})
        return model

    return make


def ggufs(architecture: str, name: str = "it.gguf", **fields: str) -> Make:
    """A file of other contents than a model: one small tensor."""

    def make(folder: Path) -> Path:
        writer = gguf.GGUFWriter(folder / name, architecture)
        for key, value in fields.items():
            writer.add_string(key.replace("_", "."), value)
        writer.add_tensor("some.weight", np.zeros((4, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return folder / name

    return make


def vocabulary(folder: Path) -> Path:
    """As llama.cpp's `--vocab-only` writes: sizes and tokenizer, without tensors."""
    whole = gguf.GGUFReader(write_gguf(folder / "whole.gguf"))
    writer = gguf.GGUFWriter(folder / "vocab.gguf", "llama")
    for key, field in whole.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "vocab.gguf"


def raw(name: str, content: bytes) -> Make:
    def make(folder: Path) -> Path:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        return folder / name

    return make


def folder_of(*names: str, **contents: dict[str, Any]) -> Make:
    def make(folder: Path) -> Path:
        for name in names:
            raw(name, b"x")(folder)
        for name, content in contents.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return folder

    return make


def without(*names: str, more: str | None = None) -> Make:
    def make(folder: Path) -> Path:
        model = make_checkpoint(folder / "model")
        for name in names:
            (model / name).unlink()
        return model if more is None else raw(more, b"x")(model).parents[more.count("/")]

    return make


def zipped(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "model.zip", "w") as file:
        file.writestr("config.json", "{}")
    return folder / "model.zip"


CASES: dict[str, tuple[Make, tuple[str, ...]]] = {
    "mlx": (mlx(False), ("quantized by MLX", "4 bits in groups of 64", "give the original checkpoint")),
    "mlx twice": (mlx(True), ("quantized by MLX", "give the original checkpoint")),
    "adapter.gguf": (ggufs("llama", general_type="adapter"), ("LoRA adapter", "general.type", "base model")),
    "mmproj": (ggufs("clip", general_type="mmproj"), ("image projector", "give the .gguf file of the language model")),
    "clip": (ggufs("clip"), ("image projector", "general.architecture = clip")),
    "imatrix": (ggufs("", general_type="imatrix"), ("importance matrix", "give the .gguf file of a language model")),
    "control vector": (ggufs("controlvector"), ("control vector", "give the .gguf file of a language model")),
    "vocabulary": (vocabulary, ("vocabulary alone", "no tensors", "give the .gguf file of a language model")),
    "whisper.gguf": (ggufs("whisper"), ("architecture 'whisper'", "give a safetensors checkpoint")),
    "no tokenizer.gguf": (ggufs("llama"), ("no tokenizer (tokenizer.ggml.model)", "give a file with one")),
    "a part": (raw("m-00001-of-00002.gguf", b""), ("it is empty", "download it again")),
    "page": (raw("m.gguf", b"<!DOCTYPE html>"), ("page of the web", "download the file itself")),
    "ggml": (raw("m.gguf", b"tjgg" + bytes(99)), ("before GGUF", "give a .gguf file")),
    "big-endian": (raw("m.gguf", b"GGUF\0\0\0\3" + bytes(99)), ("big-endian", "gguf-convert-endian")),
    "empty": (folder_of(), ("is empty", "correct the path")),
    "diffusers": (folder_of(model_index={"_class_name": "Pipeline"}), ("diffusers", "give the folder of a language")),
    "adapter": (
        folder_of(adapter_config={"base_model_name_or_path": "org/base"}),
        ("is a LoRA adapter", "give org/base as --target, and this folder as --lora"),
    ),
    "folder above": (lambda at: make_checkpoint(at / "model").parent, ("no config.json, only model", "/model")),
    "onnx": (without("model.safetensors", more="onnx/model.onnx"), ("only onnx/model.onnx (ONNX)", "give the folder")),
    "flax": (without("model.safetensors", more="flax_model.msgpack"), ("flax_model.msgpack (Flax)", "give the folder")),
    "meta": (without("model.safetensors", more="consolidated.00.pth"), ("Meta's own format", "give the folder")),
    "bad torch": (without("model.safetensors", more="pytorch_model.bin"), ("not a file of torch", "download it again")),
    "no tokenizer": (without("tokenizer.json"), ("/model has no file of a tokenizer", "add its tokenizer.json")),
    "weights": (lambda at: make_checkpoint(at / "m") / "model.safetensors", ("file of weights", "give its folder")),
    "config": (lambda at: make_checkpoint(at / "m") / "config.json", ("one file of a checkpoint", "give its folder")),
    "zip": (zipped, ("is an archive", "unpack it")),
    "unknown": (config(model_type="foobar"), ("architecture 'foobar'", "install a newer transformers")),
    "no type": (config(model_type=None), ("no model_type", "download the checkpoint again")),
    "bert": (config(model_type="bert", architectures=["BertModel"]), ("it is a BertModel", "give a language model")),
    "t5": (config(model_type="t5"), ("architecture 't5'", "an encoder", "give a decoder-only")),
    "no method": (quantized(bits=4), ("no quantization_config.quant_method", "give a checkpoint quantized otherwise")),
    "aqlm": (quantized(quant_method="aqlm"), ("quant_method = aqlm", "give a checkpoint quantized otherwise")),
    "5 bits": (quantized(quant_method="gptq", bits=5), ("bits = 5", "give a checkpoint quantized otherwise")),
    "plain": (
        quantized(quant_method="gptq", bits=4, group_size=64),
        ("down_proj.weight is not quantized", "give the config.json"),
    ),
}


SLOW = ("whisper.gguf", "bert")
"""Cases that import more of transformers."""


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
    from sharesd.models.checkpoint import read_tensors

    tensors = {"a": torch.arange(6.0).view(2, 3)}
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(dict(read_tensors(tmp_path / "pytorch_model.bin"))["a"], tensors["a"])
