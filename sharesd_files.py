"""Cache folder, atomic writes and cached JSON values.

The module imports nothing of the project. Every package may import `sharesd_files`.
"""

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
"""Name prefix of scratch folders for files that are not complete.

A killed process leaves its scratch folder on the disk.
"""


def cache_root() -> Path:
    """Return the folder of all files that can be made again.

    The folder is SHARESD_CACHE_DIR, or else the platform's cache folder.
    """
    return Path(os.environ.get("SHARESD_CACHE_DIR") or platformdirs.user_cache_dir("sharesd"))


@contextmanager
def atomic_files(folder: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a scratch folder whose entries move into `folder` at the end.

    If the block raises, nothing moves. Each entry replaces the file of the same name atomically. `durable`: contents
    and names are on the disk on return.
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
    """Yield a scratch path, which replaces `path` when the block ends.

    The path may be a file or a folder. See `atomic_files`.
    """
    with atomic_files(path.parent, durable=durable) as scratch:
        yield scratch / path.name


def atomic_write(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file atomically.

    Readers see either the old contents or the new contents. Texts are written as UTF-8.
    """
    with atomic_path(path, durable=durable) as fresh:
        fresh.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk.

    Any OSError is ignored, because some file systems do not support the flush.
    """
    with suppress(OSError):
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class JsonCache:
    """Measured value in the cache folder.

    The value is one JSON file, named after a hash of its key. A damaged file or a file in an old form logs a warning
    and counts as missing. A missing value is measured anew.
    """

    def __init__(self, part: str, kind: str, key: object) -> None:
        """`part`: folder of the cache, listed by `sharesd cache`.

        `kind`: prefix of the file name. `key`: everything on which the value depends.
        """
        self.part, self.kind, self.key = part, kind, repr(key)

    @property
    def file(self) -> Path:
        """Path of the file."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:16]
        return cache_root() / self.part / f"{self.kind}-{digest}.json"

    def with_key(self, *more: object) -> JsonCache:
        """Return the cache of a value that also depends on `more`."""
        return JsonCache(self.part, self.kind, (self.key, *more))

    def load(self, parse: Callable[[Any], T]) -> T | None:
        """Return `parse` of the value; None if it is missing or invalid.

        The value is invalid if the file cannot be read or has another key, or if `parse` raises an error of a wrong
        form (ValueError, KeyError, IndexError, TypeError or AttributeError). An invalid value logs a warning.
        """
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
        """Write a value of JSON types; return the file.

        An earlier value is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps({"key": self.key, "value": value}, indent=1, ensure_ascii=False)
        atomic_write(self.file, text + "\n")
        return self.file
