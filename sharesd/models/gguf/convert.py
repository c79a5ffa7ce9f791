"""Conversion of .gguf files to checkpoint folders in the cache.

Each file is converted once: architectures of the native decoder here, in seconds; others through transformers. Weights
are stored in bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharesd.models.checkpoint import STORED, Progress, damage_named, read_json, refuse_pointers, silent, stamp
from sharesd.models.config_checks import check_sizes
from sharesd.models.decoder_config import DecoderConfig, UnsupportedArchitecture
from sharesd.models.gguf.parts import model_stem, parts_of
from sharesd_files import SCRATCH, atomic_write, cache_root

if TYPE_CHECKING:
    from sharesd.models.gguf.reader import GGUFFile

log = logging.getLogger(__name__)

FORMAT = 5
"""Version of converted folders; a new number makes old ones unused."""
MANIFEST = "converted.json"


def converted_folder(
    gguf_file: Path, *, progress: Progress = silent, ignored: Collection[str] = (), dequantize: bool = True
) -> Path:
    """Return the checkpoint folder of a .gguf file.

    The file may be a part of a model. Converts the model if the folder is missing or damaged.
    `ignored`: keys and tensors to leave out. Without `dequantize`, the folder names the file instead of weights.

    Raises:
        ValueError: a file is damaged or missing, or has something that is not supported.
    """
    parts, ignored = parts_of(gguf_file), sorted(set(ignored))
    refuse_pointers(parts)
    folder_of_all = cache_root() / "checkpoints"
    folder = folder_of_all / f"{model_stem(gguf_file)}-{_fingerprint(parts, ignored)}{'' if dequantize else '-stored'}"
    if _holds(folder, parts):
        return folder
    try:
        folder_of_all.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder_of_all, prefix=SCRATCH) as scratch:
            fresh = Path(scratch) / "checkpoint"
            fresh.mkdir()
            _convert(parts, ignored, fresh, progress, dequantize)
            for file in fresh.iterdir():
                _flush(file)
            files = {file.name: _seal(file) for file in fresh.iterdir()}
            sources = [_seal(part) for part in parts]
            _write_manifest(fresh, {"format": FORMAT, "sources": sources, "files": files})
            if folder.exists() and not _holds(folder, parts):
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


def _fingerprint(parts: list[Path], ignored: list[str]) -> str:
    """Return a hash of the files' sizes and edges, and of `ignored`.

    Enough for headers, and cheap for large files.
    """
    edge = 1 << 20
    digest = hashlib.sha256(f"{FORMAT} {ignored}".encode())
    for file in parts:
        size = file.stat().st_size
        digest.update(f" {size} ".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(edge))
            stream.seek(max(0, size - edge))
            digest.update(stream.read(edge))
    return digest.hexdigest()[:16]


def _holds(folder: Path, parts: list[Path]) -> bool:
    """Return True if the folder is a complete conversion of these files.

    Only files whose size or time differs from the manifest are read.
    """
    if not (folder / MANIFEST).exists():
        return False
    try:
        manifest = read_json(folder / MANIFEST)
        seals = dict(zip(parts, manifest["sources"], strict=True))
        seals |= {folder / name: seal for name, seal in manifest["files"].items()}
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


def _convert(parts: list[Path], ignored: list[str], folder: Path, progress: Progress, dequantize: bool) -> None:
    from sharesd.models.gguf.parts import read_model

    name = parts[0].name
    progress(f"reading {name}", 0, 1)
    file = read_model(parts, ignored)
    progress(f"reading {name}", 1, 1)
    with damage_named(parts[0]):
        try:
            _convert_here(file, folder, progress, dequantize)
            if not dequantize:
                names = [str(part.resolve()) for part in parts]
                (folder / STORED).write_text(json.dumps({"files": names, "ignored": ignored}))
        except UnsupportedArchitecture as reason:
            if not dequantize:
                raise ValueError(f"{reason}, and stored weights run in native decoders; take --dequantize") from None
            from sharesd.models.gguf.fallback import convert_by_transformers

            log.info("%s: %s; converting by transformers", name, reason)
            convert_by_transformers(file, parts, ignored, folder, progress)


def _convert_here(file: GGUFFile, folder: Path, progress: Progress, dequantize: bool) -> None:
    """Convert natively; refuse what is not known before any write."""
    from sharesd.models.gguf.config import config_of, layout_of
    from sharesd.models.gguf.tokenizer import check_tokenizer, write_tokenizer
    from sharesd.models.gguf.weights import names_of, write_weights

    _, layout = layout_of(file)
    check_tokenizer(file)
    config = config_of(file)
    decoder_config = DecoderConfig.from_hf(config)
    check_sizes(decoder_config, sum(math.prod(tensor.shape) for tensor in file.tensors.values()))
    names_of(file, decoder_config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    progress("writing the tokenizer", 0, 1)
    write_tokenizer(file, folder, layout)
    progress("writing the tokenizer", 1, 1)
    if dequantize:
        write_weights(file, decoder_config, folder / "model.safetensors", progress)
