"""Answers on disk: a folder of JSON Lines, one shard per process, to which whole lines are added one by one.

A line counts once it ends. So a process may be killed at any moment: what its last line lacks is cut off by the next
one, and its conversation is answered anew.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multigpu import journal
from multigpu.journal import Journal, lock

SETTINGS = "settings.json"
"""What the answers depend on, beside the shards."""
SHARDS = "answers-*.jsonl"
FLAG = "--out-dir"
"""Names another folder."""


def shards_in(folder: Path) -> list[Path]:
    """All shards, by name."""
    return sorted(folder.glob(SHARDS))


def lines_of(shard: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Where each line begins (bytes), and its record; a last one that was cut off is left out.

    ValueError for a line that is no record.
    """
    for number, (offset, line) in enumerate(journal.lines_of(shard), 1):
        try:
            record = json.loads(line)
            record["index"], record["sample"], record["sequences"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{shard}:{number} is no record of `train generate`; drop the line") from error
        yield offset, record


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


class Shard(Journal):
    """A shard that this process alone adds to."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        """ValueError where another process writes it, or other shards for another number of processes."""
        for other in {*shards_in(folder)} - {*folder.glob(f"answers-*-of-{world:05d}.jsonl")}:
            with other.open("rb") as file:
                lock(file, other, fcntl.LOCK_SH, FLAG)
        super().__init__(folder / f"answers-{rank:05d}-of-{world:05d}.jsonl", FLAG)


def keep_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write down what the answers depend on; ValueError where those that are there depend on something else."""
    journal.keep_settings(folder / SETTINGS, settings, FLAG)


def settings_of(folder: Path) -> dict[str, Any]:
    """What the answers of this folder depend on; ValueError where there are none."""
    try:
        return journal.settings_of(folder / SETTINGS)
    except ValueError as error:
        raise ValueError(f"{error}; give a folder that `train generate` wrote") from error
