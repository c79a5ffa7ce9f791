"""Checkpoint folders in the Hugging Face layout: JSON files and tensors."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from pickle import PickleError
from threading import Thread
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

from safetensors import SafetensorError, safe_open

from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd_files import file_identity, files_hash

if TYPE_CHECKING:
    from torch import Tensor


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
        "give the .gguf file or folder of its base model as --target; --lora needs a folder as PEFT saves it",
    ),
    "mmproj": ("an image projector", "give the .gguf file of the language model that it belongs to"),
    "clip": ("an image projector", "give the .gguf file of the language model that it belongs to"),
    "imatrix": ("an importance matrix, as quantizing uses it", _GGUF_MODEL),
    "controlvector": ("a control vector", _GGUF_MODEL),
    "vocab": ("a vocabulary alone, without weights", _GGUF_MODEL),
}
"""Values of general.type, or architectures, that are not language models."""


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
    """Raise ValueError for a .gguf file that is not a language model."""
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


WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
STORED = "gguf.json"
"""Names of the .gguf files that hold a folder's weights."""
TARGET_QUANT = "target_quant.json"
"""File with the type that a folder's weights are quantized to."""
SOURCE = "source_folder.json"
"""File of a folder in the cache that names the checkpoint folder it stands for, see `source_of`."""
MANIFEST = "converted.json"
"""File of a converted folder with what it was made of, see `sharesd.models.conversion_cache`."""
ADAPTER = "lora_adapter"
"""Folder of a LoRA adapter within a checkpoint folder that `sharesd.models.lora` made."""
ADAPTER_CONFIG = "adapter_config.json"
MODELOPT = "hf_quant_config.json"
"""File of Model Optimizer that says how weights are quantized, if config.json does not."""
QUANT_CONFIGS = ("quantize_config.json", "quant_config.json", "quantization_config.json")
"""Files of AutoGPTQ and GPTQModel, AutoAWQ and auto-round that say the same."""
_AWQ_KEYS = ("w_bit", "q_group_size", "zero_point", "version")
"""Keys of AutoAWQ alone; its first files have no quant_method, and neither have AutoGPTQ's."""
_TEXTS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("tekken.json", "chat_template*", "additional_chat_templates/*.jinja", "generation_config.json"),
)
QUANTIZATION = ("quantization_config", "compression_config")
"""Sections of config.json about quantized weights."""
SECTION = "_config"
"""End of the names of sections in config.json."""

Progress = Callable[[str, int, int], None]
"""Progress callback: (name of the job, steps or bytes done, in all)."""


def silent(what: str, done: int, total: int) -> None:
    """Report nothing: the default `Progress`."""


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn errors of damaged values into a ValueError that names the file.

    ValueErrors get the file's name, unless they name a file of its folder; other errors are those of values of wrong
    types and sizes.
    """
    try:
        yield
    except ValueError as error:
        reason, kind = str(error), UnsupportedArchitecture if isinstance(error, UnsupportedArchitecture) else ValueError
        if str(path) in reason or f"{path.parent}/" in reason or reason.startswith(f"{path.parent} "):
            raise
        rest = reason.removeprefix(path.name)
        raise kind(f"{path}{rest}" if rest != reason else f"{path}: {reason}") from error
    except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} has a value that cannot be used ({reason}); download it again") from error


def has_file(path: Path) -> bool:
    """Return True if a file is there.

    Raises:
        ValueError: it is a link that leads nowhere, as half a download has.
    """
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a link that leads nowhere; download the checkpoint again")
    return path.exists()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: the file is missing, unreadable or not an object.
        OSError: the process has too many open files.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give a folder with a complete checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets without end
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            raise  # a limit of the process, for which the file cannot help
        raise ValueError(f"{path} cannot be read as JSON ({error}); download the checkpoint again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object; download the checkpoint again")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json without sections of null.

    Raises:
        ValueError: the folder is not a checkpoint.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give a checkpoint folder, a .gguf file or a hub id")
    if not has_file(folder / "config.json") and (folder / ADAPTER_CONFIG).exists():
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "its base model"
        raise ValueError(f"{folder} is a LoRA adapter; give {base} as --target, and this folder as --lora")
    if not (folder / "config.json").exists() and (folder / "params.json").exists():
        raise ValueError(
            f"{folder} is in Mistral's own format (params.json); download its config.json and model.safetensors (or "
            "its shards) too, or convert it with transformers' convert_mistral_weights_to_hf.py"
        )
    if not (folder / "config.json").exists():
        raise refuse_folder(folder)
    raw = read_json(folder / "config.json")
    refuse_mlx(raw, folder)
    with damage_named(folder / "config.json"):
        parts = raw, section(raw, "text_config")
    if not any(part.get(name) for part in parts for name in QUANTIZATION):
        separate = _separate_quantization(folder)
        if separate is not None:
            raw["quantization_config"] = separate
    return {name: value for name, value in raw.items() if value is not None or not name.endswith(SECTION)}


def _separate_quantization(folder: Path) -> dict[str, Any] | None:
    """Return what another file than config.json says of quantized weights."""
    if has_file(folder / MODELOPT):
        said = section(read_json(folder / MODELOPT), "quantization")
        return {"quant_method": "modelopt", **said} if said.get("quant_algo") is not None else None
    for name in QUANT_CONFIGS:
        if has_file(folder / name):
            found = read_json(folder / name)
            method = "awq" if any(key in found for key in _AWQ_KEYS) else "gptq"
            return {**found, "quant_method": found.get("quant_method") or method}
    return None


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a config; empty if it is left out.

    Raises:
        ValueError: it is not an object.
    """
    found = config.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise ValueError(f"config.json has {name!r} = {str(found)[:60]}, not an object; download the checkpoint again")
    return found or {}


def quantization_of(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the section of a config.json about quantized weights."""
    for part in (raw, section(raw, "text_config")):
        for name in QUANTIZATION:
            if part.get(name) is not None:
                return section(part, name)
    return None


def not_causal(raw: Mapping[str, Any]) -> str | None:
    """Return a remedy for the weights of a model that is made for another task, None for a language model."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or re.search(r"CausalLM|LMHead|ConditionalGeneration", name):
        return None
    return f"config.json says that it is a {name}, which writes no text: give a language model (ForCausalLM)"


def without_quantization(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the section of `quantization_of`."""
    rest = {name: value for name, value in raw.items() if name not in QUANTIZATION}
    if isinstance(rest.get("text_config"), Mapping):
        rest["text_config"] = {name: v for name, v in rest["text_config"].items() if name not in QUANTIZATION}
    return rest


def leaves_weights(said: Mapping[str, Any]) -> bool:
    """Return True for a `quantization_config` of activations or KV alone."""
    if said.get("quant_method") == "modelopt":
        return said.get("quant_algo") is None
    if said.get("quant_method") != "compressed-tensors" or section(said, "transform_config").get("config_groups"):
        return False
    groups = section(said, "config_groups")
    has_weights = any(section(section(groups, name), "weights").get("num_bits") for name in groups)
    is_sparse = section(said, "sparsity_config").get("format", "dense") != "dense"
    return not has_weights and not is_sparse and bool(groups or said.get("kv_cache_scheme"))


def is_quantized(folder: Path) -> bool:
    """Return True if a folder has a config.json of quantized weights."""
    try:
        return quantization_of(read_config(folder)) is not None
    except ValueError:  # which is reported where the config is read
        return False


def source_of(folder: Path) -> Path:
    """Return the folder whose tokenizer, templates and generation_config.json count for a checkpoint.

    A folder in the cache has weights and config.json alone: it names the folder that was given, whose other files are
    read as they are now.
    """
    return Path(read_json(folder / SOURCE)["folder"]) if (folder / SOURCE).exists() else folder


def texts_of(folder: Path) -> list[Path]:
    """Return the files of a checkpoint's tokenizer and templates, and generation_config.json."""
    return sorted({file for pattern in _TEXTS for file in folder.glob(pattern)})


def copy_texts(folder: Path, out: Path) -> None:
    """Copy a checkpoint's tokenizer, templates and generation_config.json."""
    source = source_of(folder)
    for file in texts_of(source):
        copy = out / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Return the end tokens that generation_config.json and config.json name."""
    ids: list[int] = []
    for file in (source_of(folder) / "generation_config.json", folder / "config.json"):
        if has_file(file):
            config = read_json(file)
            with damage_named(file):
                for part in (config, section(config, "text_config")):
                    if part.get("eos_token_id") is not None:
                        ids += token_ids(part["eos_token_id"])
                        break
    return tuple(dict.fromkeys(ids))


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the ids of a field: null, one id or several.

    Raises:
        ValueError: it holds something else.
    """
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    for i in ids:
        if type(i) is not int or not -1 <= i < 2**31:
            raise ValueError(f"eos_token_id is {str(value)[:60]}, not a token id or a list of them; correct the field")
    return ids


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files, safetensors first.

    Raises:
        ValueError: a file or shard is missing.
    """
    if (folder / STORED).exists():
        return [Path(name) for name in read_json(folder / STORED)["files"]]
    for name in chain(WEIGHT_FILES, _named_by_autogptq(folder)):
        index = folder / f"{name}.index.json"
        if has_file(index):
            places = read_json(index).get("weight_map", {})
            if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
                raise ValueError(f"{index} has no weight_map of tensors and files; download the checkpoint again")
            files = [folder / shard for shard in sorted(set(places.values()))]
            missing = [file.name for file in files if not file.is_file()]
            if missing or not files:
                names = ", ".join(missing) or "every shard"
                raise ValueError(f"{folder} lacks {names} named in {index.name}; download the checkpoint again")
            refuse_pointers(files)
            return files
        if has_file(folder / name):
            refuse_pointers([folder / name])
            return [folder / name]
    if (own := next(folder.glob("consolidated*.safetensors"), None)) is not None:
        raise ValueError(
            f"{folder} has weights in Mistral's own format ({own.name}); download its model.safetensors (or its "
            "shards) too, or convert it with transformers' convert_mistral_weights_to_hf.py"
        )
    raise refuse_weights(folder, WEIGHT_FILES)


def _named_by_autogptq(folder: Path) -> Iterator[str]:
    """Yield the names that AutoGPTQ gave weight files before they were called model.safetensors."""
    if has_file(folder / QUANT_CONFIGS[0]):
        said = read_json(folder / QUANT_CONFIGS[0])
        stems = said.get("model_file_base_name"), f"gptq_model-{said.get('bits')}bit-{said.get('group_size')}g"
        yield from (f"{stem}.{suffix}" for stem in stems if isinstance(stem, str) for suffix in ("safetensors", "bin"))


def refuse_pointers(files: Iterable[Path]) -> None:
    """Raise ValueError if a file is a pointer of Git LFS."""
    for file in files:
        if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(b"version https://git-lfs"):
            raise ValueError(f"{file} is a pointer of Git LFS; run `git lfs pull` there, or download the file itself")


def is_stored(folder: Path) -> bool:
    """Return True if weights can run as blocks."""
    return (folder / STORED).exists() or (folder / TARGET_QUANT).exists() or is_quantized(folder)


def adapter_files(adapter: Path) -> list[Path]:
    """Return config and weight file of a LoRA adapter.

    Raises:
        ValueError: there are no weights.
    """
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if (adapter / name).is_file():
            return [adapter / ADAPTER_CONFIG, adapter / name]
    raise ValueError(f"{adapter} has no adapter_model.safetensors; give --lora the whole folder of a LoRA adapter")


def has_weights(folder: Path) -> bool:
    """Return True if all weight files are there."""
    try:
        return bool(weight_files(folder))
    except ValueError:
        return False


def identity(folder: Path) -> str:
    """Return the key of what is kept for a checkpoint: of its config and weights as they are now.

    Large files are not read.
    """
    adapter = adapter_files(folder / ADAPTER) if (folder / ADAPTER).is_dir() else []
    more = [folder / name for name in (MODELOPT, STORED, TARGET_QUANT) if (folder / name).exists()]
    return repr([file_identity(file) for file in (folder / "config.json", *more, *weight_files(folder), *adapter)])


def write_tensors(tensors: dict[str, Tensor], file: Path, more: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; OSError if the disk does not take it.

    `more`: further metadata.
    """
    from safetensors.torch import save_file  # imports torch, and tokenizers do without

    try:
        save_file(tensors, file, metadata={"format": "pt", **(more or {})})
    except SafetensorError as error:
        if of_system := system_error(error, file):
            raise of_system from error
        raise


def system_error(error: Exception, file: Path) -> OSError | None:
    """Return the system's error where a library raised one of its own for it, like `... open files (os error 24)`."""
    text = str(error)
    for number in re.findall(r"\((?:os error )?(\d{1,3})\)", text):
        if os.strerror(int(number)) in text:
            return OSError(int(number), os.strerror(int(number)), str(file))
    return None


def raise_open_files(error: Exception, file: Path) -> None:
    """Raise OSError where a library failed since the process has too many open files, whatever the file holds."""
    found = system_error(error, file)
    if found is not None and found.errno == errno.EMFILE:
        raise found from error


def content_hash(folder: Path) -> str:
    """Return the hash of weights, adapter, configs, tokenizer and templates."""
    adapter = adapter_files(folder / ADAPTER) if (folder / ADAPTER).is_dir() else []
    texts = {
        path.name: path
        for each in (source_of(folder), folder)
        for pattern in ("*.json", "*.jinja", "*.model")
        for path in each.glob(pattern)
        if path.name not in (SOURCE, MANIFEST)
    }
    return files_hash([*texts.values(), *weight_files(folder), *adapter])


def layout_hash(folder: Path) -> str:
    """Return a hash of config, tensor names, shapes and dtypes."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder) if has_weights(folder) else ():
        digest.update(str(file.stat().st_size).encode())
        if file.suffix == ".safetensors":
            with file.open("rb") as content:
                digest.update(content.read(int.from_bytes(content.read(8), "little")))
    return digest.hexdigest()


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of one file, mapped into memory.

    Raises:
        ValueError: the file is damaged.
        OSError: the file cannot be opened.
    """
    try:
        if file.suffix == ".bin":
            import torch  # takes seconds, and tokenizers do without

            mmap = is_zipfile(file)  # files from before torch 1.6 are none, and cannot be mapped
            stored = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
            if not isinstance(stored, dict) or not all(isinstance(each, torch.Tensor) for each in stored.values()):
                raise ValueError("it holds other things than tensors by name")
            yield from stored.items()
        else:
            with suppress(RuntimeError):  # it is only faster
                Thread(target=_read_ahead, args=(file,), daemon=True).start()
            file.open("rb").close()  # safetensors calls every file missing that it cannot open
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.offset_keys():
                    yield name, tensors.get_tensor(name)
    except (SafetensorError, RuntimeError, EOFError, PickleError, OSError, ValueError, LookupError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, OSError) or "allocate memory" in reason.lower():  # of the system, not of the content
            raise
        raise_open_files(error, file)
        if isinstance(error, PickleError):  # torch's advice is to run what the file brings along
            reason = "it holds other things than tensors, or is not a file of torch"
        raise ValueError(f"{file} is damaged ({reason}); download it again") from error


def tensor_outlines(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder's weight files by name, on the meta device.

    Raises:
        ValueError: a file is damaged.
    """
    return {name: tensor.to("meta") for file in weight_files(folder) for name, tensor in read_tensors(file)}


def _read_ahead(file: Path) -> None:
    """Fill the system's file cache, which mapped pages do in small pieces."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), file.open("rb") as content:
            os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def check_stored(folder: Path, check: Callable[[int], None]) -> None:
    """Run a check on the bytes of stored weights.

    Raises:
        ValueError: of a weight file that is damaged, or else of the check.
    """
    files = weight_files(folder)
    try:
        check(sum(file.stat().st_size for file in files))
    except ValueError:
        for file in files:
            next(read_tensors(file), None)
        raise
