"""Training rows: conversations of `train generate`, packed to one length.

The held-out split, the order and the packing depend only on texts, lengths, seed and epoch. The number of processes
that wrote the answers and the order of writing have no effect. Epoch and row are therefore enough to resume a training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from train.data.loss_mask import Example
from train.data.shards import answers_in

OPEN_ROWS = 32
"""Open rows during packing."""
PADDING = -1
"""Segment id of padding."""


class SequencePosition(NamedTuple):
    """Location and length of a sequence on disk."""

    number: int
    """Number of the record in the input of `train generate`."""
    sample: int
    part: int
    """Index of the sequence in the record."""
    shard: Path
    offset: int
    """Offset of the line in bytes."""
    length: int
    """Number of tokens."""


@dataclass(frozen=True)
class Split:
    """Training and held-out sequences, of different prompts, in input order."""

    train: list[SequencePosition]
    held_out: list[SequencePosition]


def read_split(folder: Path, max_length: int, held_out: float = 0.05) -> Split:
    """Read the sequences that have a loss token within `max_length`.

    A share of `held_out` is held out, by a hash of the first user message: answers to one prompt stay together.
    Raises ValueError for a folder without sequences, or with an answer twice.
    """
    parts: dict[bool, list[SequencePosition]] = {False: [], True: []}
    for shard, offset, record in answers_in(folder):
        asked = next(message["content"] for message in record["messages"] if message["role"] == "user")
        for part, example in enumerate(map(Example.of, record["sequences"])):
            if (cut := example.cut(max_length)).num_in_loss:
                place = SequencePosition(record["index"], record["sample"], part, shard, offset, len(cut.token_ids))
                parts[_draw(asked) < held_out].append(place)
    if not any(parts.values()):
        raise ValueError(
            f"{folder} has no answer within {max_length} tokens; raise --max-length, or run `sharesd train generate`"
        )
    return Split(*(sorted(parts[side]) for side in (False, True)))


class PackedRows(Dataset[dict[str, Tensor]]):
    """Rows of `max_length` tokens with one or more conversations, epoch by epoch.

    A row is a dict of tensors [max_length]: `token_ids` (int64), `position_ids` (int64, from 0 in each segment),
    `segment_ids` (int64: tokens attend within theirs alone; -1 = padding) and `loss_mask` (bool: the token is the
    assistant's, so it is a target of the loss).
    """

    def __init__(
        self, places: Sequence[SequencePosition], max_length: int, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        """Start at epoch 0 with `places` of a `Split` of equal length.

        Without `shuffle` all epochs are equal.
        """
        self._places, self._max_length, self._seed, self._shuffle = list(places), max_length, seed, shuffle
        longest = max((place.length for place in self._places), default=0)
        if longest > max_length:
            raise ValueError(
                f"a sequence has {longest} tokens and rows have {max_length}; read the split with that length"
            )
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle and pack the rows of an epoch, by seed and epoch."""
        order = list(range(len(self._places)))
        if self._shuffle:
            digest = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()
            dice = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
            order = torch.randperm(len(order), generator=dice).tolist()
        self._rows = pack([self._places[i].length for i in order], self._max_length)
        self._rows = [[order[i] for i in row] for row in self._rows]

    def __len__(self) -> int:
        """Return the rows of this epoch; packing varies slightly between epochs."""
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        places = [self._places[i] for i in self._rows[number]]
        return row_of([_read(place).cut(self._max_length) for place in places], self._max_length)


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Return the sequences of each row, by first fit in order."""
    closed: list[list[int]] = []
    rows: list[tuple[list[int], int]] = []
    for number, length in enumerate(lengths):
        for i, (row, room) in enumerate(rows):
            if length <= room:
                row.append(number)
                rows[i] = row, room - length
                break
        else:
            rows.append(([number], max_length - length))
            if len(rows) > OPEN_ROWS:
                fullest = min(range(len(rows)), key=lambda i: rows[i][1])
                closed.append(rows.pop(fullest)[0])
    return closed + [row for row, _ in rows]


def row_of(examples: Sequence[Example], max_length: int) -> dict[str, Tensor]:
    """Return a row of `PackedRows` with these sequences, which must fit."""
    row = {
        "token_ids": torch.zeros(max_length, dtype=torch.int64),
        "position_ids": torch.zeros(max_length, dtype=torch.int64),
        "segment_ids": torch.full((max_length,), PADDING),
        "loss_mask": torch.zeros(max_length, dtype=torch.bool),
    }
    start = 0
    for segment, example in enumerate(examples):
        end = start + len(example.token_ids)
        row["token_ids"][start:end] = torch.tensor(example.token_ids)
        row["position_ids"][start:end] = torch.arange(end - start)
        row["segment_ids"][start:end] = segment
        for first, last in example.loss_spans:
            row["loss_mask"][start + first : start + last] = True
        start = end
    return row


def _read(place: SequencePosition) -> Example:
    with place.shard.open("rb") as file:
        file.seek(place.offset)
        return Example.of(json.loads(file.readline())["sequences"][place.part])


def _draw(text: str) -> float:
    """Return a number in [0, 1), a function of the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
