"""Files and folders that are no checkpoint: what each is, and what to give instead; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

GIVE = "give a checkpoint folder, a .gguf file or a hub id (owner/name)"
_FILES: tuple[tuple[str, str, str], ...] = (
    (".safetensors .bin .index.json", "a file of weights", "give its folder {folder}, with config.json and tokenizer"),
    (".json .jinja .model", "one file of a checkpoint", "give its folder {folder}"),
    (".pt .pth .ckpt", "a file of torch", "give a checkpoint folder as transformers saves it"),
    (".zip .tar .gz .tgz .xz .zst .7z .rar", "an archive", "unpack it, and give the folder"),
    (".onnx", "an ONNX model", "give the safetensors checkpoint or .gguf file of the model"),
    (".nemo", "a NeMo archive", "convert it to a checkpoint of transformers"),
    (".ggml .llamafile", "a file from before GGUF, or a program", "give the .gguf file of the model"),
)
"""Endings of files, what they are, and what helps."""
_WEIGHTS: tuple[tuple[str, str], ...] = (
    ("*.onnx", "ONNX"),
    ("onnx/*.onnx", "ONNX"),
    ("openvino_model.*", "OpenVINO"),
    ("*.h5", "TensorFlow"),
    ("*.msgpack", "Flax"),
    ("consolidated*.safetensors", "Mistral's own format"),
    ("consolidated*.pth", "Meta's own format"),
    ("*.mlpackage", "Core ML"),
    ("*.tflite", "TensorFlow Lite"),
    ("*.gguf", "GGUF"),
    ("*.pt", "torch"),
    ("*.ckpt", "torch"),
    ("*.safetensors", "safetensors of other names"),
    ("*.bin", "torch files of other names"),
)
_BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (
    (b"<", "a page of the web", "download the file itself, not its page"),
    (b"PK\x03\x04", "an archive or a file of torch", "give the .gguf file of the model"),
    (b"ggml", "a GGML file from before GGUF", "give a .gguf file of the model"),
    (b"lmgg", "a GGML file from before GGUF", "give a .gguf file of the model"),
    (b"tjgg", "a GGML file from before GGUF", "give a .gguf file of the model"),
    (b"fmgg", "a GGML file from before GGUF", "give a .gguf file of the model"),
    (b"GGUF\x00\x00\x00", "in big-endian order", "convert it with gguf-convert-endian (pip install gguf)"),
)
_GGUF_MODEL = "give the .gguf file of a language model as --target"
_GGUF_KINDS: Mapping[str, tuple[str, str]] = {
    "adapter": (
        "a LoRA adapter",
        "give the .gguf file or folder of its base model as --target; --lora takes a folder as PEFT saves it",
    ),
    "mmproj": ("an image projector", "give the .gguf file of the language model that it belongs to"),
    "clip": ("an image projector", "give the .gguf file of the language model that it belongs to"),
    "imatrix": ("an importance matrix, as quantizing uses it", _GGUF_MODEL),
    "controlvector": ("a control vector", _GGUF_MODEL),
    "vocab": ("a vocabulary alone, without weights", _GGUF_MODEL),
}
"""Values of general.type, or architectures, that are no language model."""


def refuse_file(path: Path, shown: object) -> ValueError:
    """Return the error for a file that is no .gguf file; `shown`: as it was given."""
    for endings, what, remedy in _FILES:
        if path.name.lower().endswith(tuple(endings.split())):
            return ValueError(f"{shown} is {what}; {remedy.format(folder=path.parent)}")
    return ValueError(f"{shown} is a file; {GIVE}")


def refuse_folder(folder: Path) -> ValueError:
    """Return the error for a folder without config.json."""
    if (folder / "model_index.json").exists():
        what = "is a pipeline of diffusers (model_index.json), which makes no text"
        return ValueError(f"{folder} {what}; give the folder of a language model")
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if not names:
        return ValueError(f"{folder} has no config.json: it is empty; download the checkpoint, or correct the path")
    within = next((path.parent for path in sorted(folder.glob("*/config.json"))), None)
    remedy = f"give {within}" if within else "give the folder that holds config.json and the weights"
    return ValueError(f"{folder} has no config.json, only {_shown(names)}; {remedy}")


def refuse_weights(folder: Path, wanted: Iterable[str]) -> ValueError:
    """Return the error for a folder without files of weights that are read."""
    for pattern, what in _WEIGHTS:
        found = sorted(str(path.relative_to(folder)) for path in folder.glob(pattern))
        if found:
            only = f" that are read here, only {_shown(found)} ({what})"
            break
    else:
        only = ""
    names = " or ".join(wanted)
    return ValueError(f"{folder} has no weights{only}; give the folder that has {names}, or their index of shards")


def what_begins_so(beginning: bytes) -> tuple[str, str]:
    """Return what a file is that is no GGUF file of little-endian order, and what helps; empty if unknown."""
    if not beginning:
        return "empty", "download it again"
    return next((kind[1:] for kind in _BEGINNINGS if beginning.lstrip().startswith(kind[0])), ("", ""))


def refuse_other_gguf(metadata: Mapping[str, Any], has_tensors: bool) -> None:
    """Raise ValueError for a .gguf file that is no language model."""
    for key in ("general.type", "general.architecture"):
        if (kind := str(metadata.get(key))) in _GGUF_KINDS:
            what, remedy = _GGUF_KINDS[kind]
            raise ValueError(f"it is {what} ({key} = {kind}); {remedy}")
    if not has_tensors:
        what, remedy = _GGUF_KINDS["vocab"]
        raise ValueError(f"it is {what} (it has no tensors); {remedy}")


def refuse_mlx(raw: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError for weights that MLX quantized, which are in a layout of its own.

    Their config.json has a section `quantization`, and a copy of it as `quantization_config` without a method.
    """
    said, copy = raw.get("quantization"), raw.get("quantization_config")
    is_other = isinstance(copy, Mapping) and "quant_method" in copy
    if isinstance(said, Mapping) and {"bits", "group_size"} <= said.keys() and not is_other:
        raise ValueError(
            f"{folder} is quantized by MLX (config.json has {said['bits']} bits in groups of {said['group_size']}), "
            "whose layout is not supported; give the original checkpoint, a .gguf file, or an AWQ or GPTQ folder"
        )


def _shown(names: list[str]) -> str:
    return ", ".join(islice(names, 3)) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
