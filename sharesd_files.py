"""Cache folder, atomic writes and cached JSON values. Imports nothing of the project; every package may import it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

log = logging.getLogger(__name__)

T = TypeVar("T")

SCRATCH = ".partial-"
"""Prefix of folders in which files are written before they get their names; a killed process leaves one behind."""


def cache_root() -> Path:
    """Folder of everything that can be made again: SHARESD_CACHE_DIR, or the platform's cache folder."""
    return Path(os.environ.get("SHARESD_CACHE_DIR") or platformdirs.user_cache_dir("sharesd"))


@contextmanager
def atomic_files(folder: Path, *, durable: bool = False) -> Iterator[Path]:
    """Scratch folder whose entries move into `folder` when the block ends.

    If the block raises, nothing moves. Each entry replaces the file of its name at once, never in part.
    `durable`: contents and names are on the disk before this returns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH, ignore_cleanup_errors=True) as scratch:
        yield Path(scratch)
        fresh = sorted(Path(scratch).iterdir())
        if durable:
            for path in fresh:
                _sync(path)
        for path in fresh:
            path.replace(folder / path.name)
        if durable:
            sync_folder(folder)


@contextmanager
def atomic_path(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Path of a file or folder to write in the block, which then replaces `path`; see `atomic_files`."""
    with atomic_files(path.parent, durable=durable) as scratch:
        yield scratch / path.name


def atomic_write(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file as a whole: readers see the old contents or the new. Texts are written as UTF-8."""
    with atomic_path(path, durable=durable) as fresh:
        fresh.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Flush names that were made or replaced in a folder to the disk; some file systems cannot."""
    with suppress(OSError):
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class JsonCache:
    """Measured value in the cache folder: one JSON file, named after a hash of its key.

    Damaged files and files in an old form count as missing, with a warning: values are measured anew.
    """

    def __init__(self, part: str, kind: str, key: object) -> None:
        """`part`: folder of the cache, listed by `sharesd cache`. `key`: everything that the value depends on."""
        self.part, self.kind, self.key = part, kind, repr(key)

    @property
    def file(self) -> Path:
        """File of the value."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:16]
        return cache_root() / self.part / f"{self.kind}-{digest}.json"

    def with_key(self, *more: object) -> JsonCache:
        """Cache of a value that depends on `more` besides."""
        return JsonCache(self.part, self.kind, (self.key, *more))

    def load(self, parse: Callable[[Any], T]) -> T | None:
        """Return `parse` of the value; None if there is none, or `parse` raises an error of a wrong form."""
        try:
            found = json.loads(self.file.read_bytes())
            if found["key"] != self.key:
                raise ValueError("it has another key")
            return parse(found["value"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            log.warning("%s is ignored and made anew, it cannot be read (%r)", self.file, error)
            return None

    def save(self, value: Any) -> Path:
        """Write a value (of JSON's types) in place of an earlier one; returns the file. OSError if that fails."""
        text = json.dumps({"key": self.key, "value": value}, indent=1, ensure_ascii=False)
        atomic_write(self.file, text + "\n")
        return self.file
