"""Answers on disk: a folder of JSON Lines, one shard per process.

A line is complete if it ends with a newline. An incomplete last line of a killed process is removed, and its
conversation is generated again.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multigpu import journal
from multigpu.journal import Journal, lock

SETTINGS = "settings.json"
"""File of the settings on which answers depend."""
SHARDS = "answers-*.jsonl"
FLAG = "--out-dir"
"""Option that names another folder, for error messages."""


def shards_in(folder: Path) -> list[Path]:
    """Return all shards, sorted by name."""
    return sorted(folder.glob(SHARDS))


def read_lines(shard: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield byte offset and record of each complete line.

    Raises ValueError if a line is not a record.
    """
    return journal.read_records(shard, FLAG, journal.with_fields("index", "sample", "sequences"))


def answers_in(folder: Path) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """Yield shard, byte offset and record of every answer.

    Raises ValueError for duplicates.
    """
    found = set[tuple[int, int]]()
    for shard in shards_in(folder):
        for offset, record in read_lines(shard):
            key = record["index"], record["sample"]
            if key in found:
                raise ValueError(
                    f"{shard} has answer {key[1]} to record {key[0]}, which another line has; remove that line"
                )
            found.add(key)
            yield shard, offset, record


class AnswerShard(Journal):
    """Shard that only this process appends to."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        """Open a shard for writing.

        Raises ValueError if another process writes it, or if shards of another number of processes exist.
        """
        for other in {*shards_in(folder)} - {*folder.glob(f"answers-*-of-{world:05d}.jsonl")}:
            with other.open("rb") as file:
                lock(file, other, fcntl.LOCK_SH, FLAG)
        super().__init__(folder / f"answers-{rank:05d}-of-{world:05d}.jsonl", FLAG)


def keep_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write the answers' settings; ValueError if existing ones differ."""
    journal.keep_settings(folder / SETTINGS, settings, FLAG)


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder's answers; ValueError without any."""
    try:
        return journal.settings_of(folder / SETTINGS)
    except ValueError as error:
        raise ValueError(f"{error}; give a folder that `train generate` wrote") from error
