"""Checkpoint folders in the cache that were converted from other files.

Each conversion runs once. A folder that is incomplete, damaged, or made of files that have changed is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sharesd.models.checkpoint import read_json, stamp
from sharesd_files import SCRATCH, atomic_write, cache_root

log = logging.getLogger(__name__)

FORMAT = 5
"""Version of converted folders; a new number makes old ones unused."""
MANIFEST = "converted.json"


def converted(
    source: Path, files: Sequence[Path], *, stem: str, key: object, ending: str = "", write: Callable[[Path], None]
) -> Path:
    """Return the folder that `write` fills from the files of a source.

    `stem`, `key`, `ending`: name of the folder, and what it depends on beside the files.

    Raises:
        ValueError: of `write`, or the cache cannot be written.
    """
    folder_of_all = cache_root() / "checkpoints"
    folder = folder_of_all / f"{stem}-{_fingerprint(files, key)}{ending}"
    if _holds(folder, files):
        return folder
    try:
        folder_of_all.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder_of_all, prefix=SCRATCH) as scratch:
            fresh = Path(scratch) / "checkpoint"
            fresh.mkdir()
            write(fresh)
            for file in fresh.iterdir():
                if not file.is_symlink():
                    _flush(file)
            seals = {file.name: _seal(file) for file in fresh.iterdir()}
            sources = [_seal(file) for file in files]
            _write_manifest(fresh, {"format": FORMAT, "sources": sources, "files": seals})
            if folder.exists() and not _holds(folder, files):
                log.warning("%s is damaged or outdated; converted %s again", folder, source.name)
                folder.rename(Path(scratch) / "damaged")
            if not folder.exists():  # another process may have been faster
                fresh.rename(folder)
    except OSError as error:
        raise ValueError(
            f"cannot convert {source} into {folder_of_all} ({error}); "
            "free some space there or set SHARESD_CACHE_DIR to another folder"
        ) from error
    return folder


def is_converted(folder: Path) -> bool:
    """Return True if a folder was converted."""
    return (folder / MANIFEST).exists()


def _fingerprint(files: Sequence[Path], key: object) -> str:
    """Return a hash of the files' sizes and edges, and of `key`.

    Enough for headers, and cheap for large files.
    """
    edge = 1 << 20
    digest = hashlib.sha256(f"{FORMAT} {key}".encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f" {size} ".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(edge))
            stream.seek(max(0, size - edge))
            digest.update(stream.read(edge))
    return digest.hexdigest()[:16]


def _holds(folder: Path, sources: Sequence[Path]) -> bool:
    """Return True if the folder is a complete conversion of these files.

    Only files whose size or time differs from the manifest are read.
    """
    if not (folder / MANIFEST).exists():
        return False
    try:
        manifest = read_json(folder / MANIFEST)
        seals = dict(zip(sources, manifest["sources"], strict=True))
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
