"""Journal and settings files of resumable runs."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar

from sharesd_files import atomic_path, sync_folder

log = logging.getLogger(__name__)

T = TypeVar("T")


class Journal:
    """JSON Lines file that only this process appends to.

    An incomplete last line, left by a killed process, is removed on opening.
    """

    def __init__(self, path: Path, flag: str) -> None:
        """Open the file.

        Raises ValueError, naming `flag`, if another process writes the file.
        """
        self.path = path
        self._file = path.open("ab+")
        try:
            lock(self._file, path, fcntl.LOCK_EX, flag)
            self._file.seek(0)
            whole = sum(len(line) for line in self._file if line.endswith(b"\n"))
            if whole < self._file.tell():
                log.warning("%s ends in the middle of a line, which is removed and written again", path)
            self._file.truncate(whole)
            os.fsync(self._file.fileno())
            sync_folder(path.parent)
        except BaseException:
            self._file.close()
            raise

    def add(self, record: dict[str, Any]) -> None:
        """Append a record durably; none of it stays after an OSError."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        descriptor = self._file.fileno()
        before = os.fstat(descriptor).st_size
        try:
            while line:
                line = line[os.write(descriptor, line) :]
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, before)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each complete line and the line's offset in bytes."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield offset, line
            offset += len(line)


def read_records(path: Path, flag: str, parse: Callable[[Any], T]) -> Iterator[tuple[int, T]]:
    """Yield offset and parsed record of each complete line.

    Raises ValueError, naming file:line and `flag`, if `parse` fails.
    """
    for number, (offset, line) in enumerate(read_lines(path), 1):
        try:
            record = parse(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}:{number} is not a record ({error!r}); drop the line, or give another {flag}"
            ) from error
        yield offset, record


def with_fields(*names: str) -> Callable[[Any], dict[str, Any]]:
    """Return a `parse` of `read_records` that requires fields."""
    take = itemgetter(*names)

    def parse(record: dict[str, Any]) -> dict[str, Any]:
        take(record)
        return record

    return parse


def write_in_order(path: Path, journal: Path, num: int) -> None:
    """Write a journal's lines by `index`, 0 to `num` - 1, atomically.

    Raises RuntimeError unless each index occurs once.
    """
    places: dict[int, int] = {}
    for offset, line in read_lines(journal):
        index = json.loads(line)["index"]
        if index in places or not 0 <= index < num:
            raise RuntimeError(f"{journal} has an extra line with index {index}; remove the line")
        places[index] = offset
    if len(places) < num:
        raise RuntimeError(f"{journal} has {len(places)} of {num} lines; run the same command again to resume")
    with atomic_path(path, durable=True) as fresh, journal.open("rb") as lines, fresh.open("wb") as file:
        for index in range(num):
            lines.seek(places[index])
            file.write(lines.readline())


def keep_settings(path: Path, settings: dict[str, Any], flag: str) -> None:
    """Write the settings of results; raises ValueError if existing ones differ.

    The message names `flag`, the option for another folder.
    """
    text = json.dumps(settings, indent=2)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)  # unlike a rename, it never replaces a file that another process has written since
        sync_folder(path.parent)
    except FileExistsError:
        before = settings_of(path)
        for name, value in json.loads(text).items():
            if before.get(name) != value:
                raise ValueError(
                    f"{path} says {name} {json.dumps(before.get(name))} and now it is {json.dumps(value)}; use the "
                    f"same settings to resume, or give another {flag}"
                ) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            draft.unlink()


def settings_of(path: Path) -> dict[str, Any]:
    """Read settings; raises ValueError if the file is unreadable."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}); give another folder"
        ) from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"{path} cannot be read (it holds a {kind}, not settings); give another folder")
    return found


def lock(file: IO[bytes], path: Path, kind: int, flag: str) -> None:
    """Take an fcntl lock; raises ValueError if another process has it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process writes {path}; wait for its end, or give another {flag}") from None
