"""Conversion of .gguf files to checkpoint folders in the cache.

Each file is converted once: architectures of the native decoder here, in seconds; others through transformers. Weights
are stored in bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sharesd.models.checkpoint import Progress, read_json, silent, stamp
from sharesd.models.decoder_config import DecoderConfig, UnsupportedArchitecture
from sharesd_files import SCRATCH, atomic_write, cache_root

if TYPE_CHECKING:
    from sharesd.models.gguf.reader import GGUFFile

log = logging.getLogger(__name__)

FORMAT = 3
"""Version of converted folders; a new number makes old ones unused."""
MANIFEST = "converted.json"


def converted_folder(gguf_file: Path, *, progress: Progress = silent) -> Path:
    """Return the checkpoint folder of a .gguf file.

    Converts the file if the folder is missing or damaged.
    """
    folder_of_all = cache_root() / "checkpoints"
    folder = folder_of_all / f"{gguf_file.stem}-{_fingerprint(gguf_file)}"
    if _holds(folder, gguf_file):
        return folder
    try:
        folder_of_all.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder_of_all, prefix=SCRATCH) as scratch:
            fresh = Path(scratch) / "checkpoint"
            fresh.mkdir()
            _convert(gguf_file, fresh, progress)
            for file in fresh.iterdir():
                _flush(file)
            files = {file.name: _seal(file) for file in fresh.iterdir()}
            _write_manifest(fresh, {"format": FORMAT, "source": _seal(gguf_file), "files": files})
            if folder.exists() and not _holds(folder, gguf_file):
                log.warning("%s is damaged or outdated; converted %s again", folder, gguf_file.name)
                folder.rename(Path(scratch) / "damaged")
            if not folder.exists():  # another process may have been faster
                fresh.rename(folder)
    except OSError as error:
        raise ValueError(
            f"cannot convert {gguf_file} into {folder_of_all} ({error}); "
            "free some space there or set SHARESD_CACHE_DIR to another folder"
        ) from error
    return folder


def _fingerprint(file: Path) -> str:
    """Return a hash of a file's size, beginning and end.

    Enough for headers, and cheap for large files.
    """
    size, edge = file.stat().st_size, 1 << 20
    digest = hashlib.sha256(f"{FORMAT} {size}".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(edge))
        stream.seek(max(0, size - edge))
        digest.update(stream.read(edge))
    return digest.hexdigest()[:16]


def _holds(folder: Path, gguf_file: Path) -> bool:
    """Return True if the folder is a complete conversion of this file.

    Only files whose size or time differs from the manifest are read.
    """
    if not (folder / MANIFEST).exists():
        return False
    try:
        manifest = read_json(folder / MANIFEST)
        seals = {gguf_file: manifest["source"], **{folder / name: seal for name, seal in manifest["files"].items()}}
        moved = [file for file, seal in seals.items() if not file.is_file() or stamp(file) != seal["stamp"]]
        if not all(file.is_file() and _sha256(file) == seals[file]["sha256"] for file in moved):
            return False
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    if moved:  # copied or touched, and still the same
        for file in moved:
            seals[file]["stamp"] = stamp(file)
        with suppress(OSError):  # not ours to write: read again next time
            _write_manifest(folder, manifest)
    return True


def _seal(file: Path) -> dict[str, Any]:
    return {"stamp": stamp(file), "sha256": _sha256(file)}


def _flush(file: Path) -> None:
    """Flush a file to disk.

    A power cut must not leave zeros under the recorded size and time.
    """
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    atomic_write(folder / MANIFEST, json.dumps(manifest))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    from sharesd.models.gguf.reader import read_gguf
    from sharesd.models.gguf.tokenizer import special_tokens

    progress(f"reading {gguf_file.name}", 0, 1)
    file = read_gguf(gguf_file)
    progress(f"reading {gguf_file.name}", 1, 1)
    try:
        _convert_here(file, folder, progress)
    except UnsupportedArchitecture as reason:
        log.info("%s: %s; converting by transformers", gguf_file.name, reason)
        _convert_by_transformers(gguf_file, folder, progress)
        config_file = folder / "tokenizer_config.json"  # the file's own words: transformers 5.17 mistakes bos for eos
        config = (read_json(config_file) if config_file.exists() else {}) | special_tokens(file)
        config_file.write_text(json.dumps(config, indent=1, ensure_ascii=False), encoding="utf-8")


def _convert_here(file: GGUFFile, folder: Path, progress: Progress) -> None:
    """Convert natively; UnsupportedArchitecture, before any write, if something is not known."""
    from sharesd.models.gguf.config import config_of
    from sharesd.models.gguf.tokenizer import check_tokenizer, write_tokenizer
    from sharesd.models.gguf.weights import names_of, write_weights

    config = config_of(file)
    DecoderConfig.from_hf(config)
    check_tokenizer(file)
    names_of(file)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    write_weights(file, heads, folder / "model.safetensors", progress)
    progress("writing the tokenizer", 0, 1)
    write_tokenizer(file, folder)
    progress("writing the tokenizer", 1, 1)


def _convert_by_transformers(gguf_file: Path, folder: Path, progress: Progress) -> None:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from sharesd.models.hf import quiet_transformers

    where, name = str(gguf_file.parent), gguf_file.name
    what = f"converting {name} by transformers"
    progress(what, 0, 2)
    try:
        with quiet_transformers(), redirect_stderr(StringIO()):  # one of its progress bars knows no switch
            model = AutoModelForCausalLM.from_pretrained(
                where, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
            )
            tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ValueError(
            f"transformers {transformers.__version__} cannot convert {gguf_file} ({error}); "
            "give a safetensors checkpoint"
        ) from error
    progress(what, 1, 2)
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    progress(what, 2, 2)
