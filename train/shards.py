"""Answers on disk: a folder of JSON Lines, one shard per process, to which whole lines are added one by one.

A line counts once it ends. So a process may be killed at any moment: what its last line lacks is cut off by the next
one, and its conversation is answered anew.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

SETTINGS = "settings.json"
"""What the answers depend on, beside the shards."""
SHARDS = "answers-*.jsonl"


def shards_in(folder: Path) -> list[Path]:
    """All shards, by name."""
    return sorted(folder.glob(SHARDS))


def lines_of(shard: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Where each line begins (bytes), and its record; a last one that was cut off is left out.

    ValueError for a line that is no record.
    """
    offset = 0
    with shard.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
                record["index"], record["sample"], record["sequences"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{shard}:{number} is no record of `train generate`; drop the line") from error
            yield offset, record
            offset += len(line)


def answers_in(folder: Path) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """Of every answer: its shard, where its line begins, and its record. ValueError for one that is there twice."""
    found = set[tuple[int, int]]()
    for shard in shards_in(folder):
        for offset, record in lines_of(shard):
            key = record["index"], record["sample"]
            if key in found:
                raise ValueError(
                    f"{shard} has answer {key[1]} to record {key[0]}, which is there already; drop its line"
                )
            found.add(key)
            yield shard, offset, record


class Shard:
    """A shard that this process alone adds to."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        """ValueError where another process writes it, or other shards for another number of processes."""
        self.path = folder / f"answers-{rank:05d}-of-{world:05d}.jsonl"
        for other in {*shards_in(folder)} - {*folder.glob(f"answers-*-of-{world:05d}.jsonl")}:
            with other.open("rb") as file:
                _lock(file, other, fcntl.LOCK_SH)
        self._file = self.path.open("ab+")
        try:
            _lock(self._file, self.path, fcntl.LOCK_EX)
            self._file.truncate(_whole(self._file))
            os.fsync(self._file.fileno())
            _sync_folder(folder)
        except BaseException:
            self._file.close()
            raise

    def add(self, record: dict[str, Any]) -> None:
        """Add a record, which is on the disk when this returns."""
        self._file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def keep_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write down what the answers depend on; ValueError where those that are there depend on something else."""
    path, text = folder / SETTINGS, json.dumps(settings, indent=2)
    draft = folder / f".{SETTINGS}.{os.getpid()}"
    with draft.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)  # unlike a rename it never replaces what another process has written meanwhile
        _sync_folder(folder)
    except FileExistsError:
        before = settings_of(folder)
        for name, value in json.loads(text).items():
            if before.get(name) != value:
                raise ValueError(
                    f"{path} says {name} {json.dumps(before.get(name))} and now it is {json.dumps(value)}; go on as "
                    "before, or give another --out-dir"
                ) from None
    finally:
        draft.unlink()


def settings_of(folder: Path) -> dict[str, Any]:
    """What the answers of this folder depend on; ValueError where there are none."""
    path = folder / SETTINGS
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read; give a folder that `train generate` wrote") from error


def _whole(file: IO[bytes]) -> int:
    """Bytes up to the end of the last line that ends."""
    file.seek(0)
    return sum(len(line) for line in file if line.endswith(b"\n"))


def _lock(file: IO[bytes], path: Path, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process writes {path}; wait for its end, or give another --out-dir") from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
