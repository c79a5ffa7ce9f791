"""Cache folder, identity of files, atomic writes and cached JSON values, without other imports."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

log = logging.getLogger(__name__)

T = TypeVar("T")

SMALL_BYTES = 2**20
"""Size below which a file is identified by its content."""
KEPT_BYTES = 2**24
"""Size from which a file's hash is kept, until the file changes."""
SCRATCH = ".partial-"
"""Prefix of scratch folders, which killed processes leave on the disk."""


def cache_root() -> Path:
    """Return SHARESD_CACHE_DIR, or else the platform's cache folder."""
    return Path(os.path.expanduser(os.environ.get("SHARESD_CACHE_DIR") or platformdirs.user_cache_dir("sharesd")))


def file_identity(file: Path) -> list[str | int]:
    """Return the key under which caches keep what is made from a file.

    It is the path, without links, and the hash of a small file's content. A large file is not read: size, inode and
    times stand for its content. The time of the last status change is one of them, since tools that restore the
    modification time (`cp -p`, `rsync -t`) cannot set it.
    """
    file = file.resolve()
    status = file.stat()
    if status.st_size < SMALL_BYTES:
        return [str(file), hashlib.sha256(file.read_bytes()).hexdigest()]
    return [str(file), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def remove_left_overs(folder: Path) -> None:
    """Remove scratch folders that killed processes have left in a folder.

    A process locks its scratch folders. On file systems without locks they stay.
    """
    with suppress(OSError):
        for entry in [each for each in os.scandir(folder) if each.name.startswith(SCRATCH)]:
            with suppress(OSError):
                lock = os.open(entry.path, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry.path, ignore_errors=True)
                finally:
                    os.close(lock)


def clean_cache() -> None:
    """Remove what killed processes have left in the cache."""
    with suppress(OSError):
        for part in cache_root().iterdir():
            remove_left_overs(part)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder within `parent`, which is removed in the end."""
    parent.mkdir(parents=True, exist_ok=True)
    scratch, lock = _locked_folder(parent)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """Make a scratch folder; return it with the descriptor that locks it."""
    while True:
        scratch = Path(tempfile.mkdtemp(dir=parent, prefix=SCRATCH))
        try:
            lock = os.open(scratch, os.O_RDONLY)
        except FileNotFoundError:  # another start took it for left over, before the lock
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another start is about to remove it
            os.close(lock)
            continue
        except OSError:  # a file system without locks
            return scratch, lock
        if scratch.exists():
            return scratch, lock
        os.close(lock)


@contextmanager
def atomic_files(folder: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a scratch folder; entries replace those in `folder` unless it raises.

    `durable`: contents and names are on the disk on return. An OSError of writing names the entry or `folder`.
    """
    try:
        with scratch_folder(folder) as scratch:
            yield scratch
            fresh = sorted(scratch.iterdir())
            if durable:
                for path in fresh:
                    _sync(path)
            for path in fresh:
                path.replace(folder / path.name)
            if durable:
                sync_folder(folder)
    except OSError as error:
        if error.errno is None or (error.filename is not None and SCRATCH not in str(error.filename)):
            raise
        raise OSError(error.errno, error.strerror, str(error.filename2 or folder)) from error


@contextmanager
def atomic_path(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a scratch path, which replaces `path` when the block ends."""
    with atomic_files(path.parent, durable=durable) as scratch:
        yield scratch / path.name


def atomic_write(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file atomically; texts as UTF-8."""
    with atomic_path(path, durable=durable) as fresh:
        fresh.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def made_once(path: Path) -> Iterator[None]:
    """Wait while another process makes `path`, which may be there afterwards; no wait where no lock can be taken."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(lock, os.O_CREAT | os.O_RDWR)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            lock.unlink()
        os.close(opened)


_warned: set[Path] = set()


def warn_unwritable(path: Path, error: Exception, consequence: str) -> None:
    """Warn once per folder that a file of the cache is not kept."""
    if path.parent in _warned:
        return
    _warned.add(path.parent)
    reason = getattr(error, "strerror", None) or str(error).partition("I/O error: ")[2].partition(" (os")[0] or error
    log.warning(
        "%s cannot be written (%s): %s; free some space there, or set SHARESD_CACHE_DIR to another folder",
        *(path.parent, reason, consequence),
    )


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder, where the file system supports it."""
    with suppress(OSError):
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class JsonCache:
    """Measured value in the cache folder, named after its key.

    A damaged file or another form logs a warning and counts as missing.
    """

    def __init__(self, part: str, kind: str, key: object) -> None:
        """`part`: folder; `kind`: file prefix; `key`: everything that affects the value."""
        self.part, self.kind, self.key = part, kind, repr(key)

    @property
    def file(self) -> Path:
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:16]
        return cache_root() / self.part / f"{self.kind}-{digest}.json"

    def with_key(self, *more: object) -> JsonCache:
        return JsonCache(self.part, self.kind, (self.key, *more))

    def load(self, parse: Callable[[Any], T]) -> T | None:
        """Return `parse` of the value; None with a warning if invalid."""
        try:
            found = json.loads(self.file.read_bytes())
            if found["key"] != self.key:
                raise ValueError("it has another key")
            return parse(found["value"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s cannot be read and is replaced (%r)", self.file, error)
            return None

    def save(self, value: Any) -> Path:
        """Write a value of JSON types in place of an earlier one."""
        text = json.dumps({"key": self.key, "value": value}, indent=1, ensure_ascii=False)
        atomic_write(self.file, text + "\n")
        return self.file

    def keep(self, value: Any) -> None:
        """Save a value if the disk takes it; log a warning once if not."""
        try:
            self.save(value)
        except OSError as error:
            warn_unwritable(self.file, error, "what was measured is measured again at the next start")


def file_hash(path: Path) -> str:
    """Return a file's SHA-256; that of a large file is computed once."""
    kept = JsonCache("settings", "sha256", file_identity(path)) if path.stat().st_size >= KEPT_BYTES else None
    found = kept.load(str) if kept is not None else None
    if found is None:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if kept is not None:
            kept.keep(found)
    return found


def files_hash(files: Iterable[Path]) -> str:
    """Return the SHA-256 of what `sha256sum` prints for files in order of their names."""
    lines = (f"{file_hash(path)}  {path.name}\n" for path in sorted(files, key=lambda path: path.name))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
