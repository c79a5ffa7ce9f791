"""What `train generate` wrote, as rows for a trainer: conversations packed into sequences of one length.

Which conversations are held out, how they are shuffled and which of them share a row depends on the answers' texts and
lengths, the seed and the epoch alone: neither on the number of processes that wrote them nor on the order in which they
did. So a place in training is two numbers, the epoch and the row.
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
"""Rows that are being filled at a time while packing."""
PADDING = -1
"""Segment of places that hold no token."""


class Place(NamedTuple):
    """Where a sequence lies, and how long it is."""

    number: int
    """Number of its record in the input of `train generate`."""
    sample: int
    part: int
    """Which of the record's sequences."""
    shard: Path
    offset: int
    """Bytes before its line."""
    length: int
    """Tokens."""


@dataclass(frozen=True)
class Split:
    """Sequences to train on, and others, of other prompts, to measure with; both in the order of the input."""

    train: list[Place]
    held_out: list[Place]


def read_split(folder: Path, max_length: int, held_out: float = 0.05) -> Split:
    """The sequences of a folder, without those that have no token in the loss within `max_length`.

    Whether a conversation is held out is a function of what its user says first: about a share of `held_out` is, all
    answers to a prompt together, whatever else the folder holds. ValueError for a folder without sequences, and one
    that holds an answer twice.
    """
    parts: dict[bool, list[Place]] = {False: [], True: []}
    for shard, offset, record in answers_in(folder):
        asked = next(message["content"] for message in record["messages"] if message["role"] == "user")
        for part, example in enumerate(map(Example.of, record["sequences"])):
            if (cut := example.cut(max_length)).num_in_loss:
                place = Place(record["index"], record["sample"], part, shard, offset, len(cut.token_ids))
                parts[_draw(asked) < held_out].append(place)
    if not any(parts.values()):
        raise ValueError(
            f"{folder} holds no answer within {max_length} tokens; let `sharesd train generate` write some"
        )
    return Split(*(sorted(parts[side]) for side in (False, True)))


class PackedRows(Dataset[dict[str, Tensor]]):
    """Rows of `max_length` tokens, each with one conversation or several, for one epoch after the other.

    A row is a dict of tensors [max_length]: `token_ids` (int64), `position_ids` (int64, from 0 in each segment),
    `segment_ids` (int64: tokens attend within theirs alone; -1 = padding) and `loss_mask` (bool: the token is the
    assistant's, so it is to be foretold).
    """

    def __init__(self, places: Sequence[Place], max_length: int, *, seed: int = 0, shuffle: bool = True) -> None:
        """Epoch 0; `places` are those of a `Split` made for the same length. Without `shuffle` all epochs are alike."""
        self._places, self._max_length, self._seed, self._shuffle = list(places), max_length, seed, shuffle
        longest = max((place.length for place in self._places), default=0)
        if longest > max_length:
            raise ValueError(f"a sequence has {longest} tokens and rows {max_length}; read the split for that length")
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle and pack anew; a function of the seed and the epoch."""
        order = list(range(len(self._places)))
        if self._shuffle:
            digest = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()
            dice = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
            order = torch.randperm(len(order), generator=dice).tolist()
        self._rows = pack([self._places[i].length for i in order], self._max_length)
        self._rows = [[order[i] for i in row] for row in self._rows]

    def __len__(self) -> int:
        """Rows of this epoch, which may differ a little from one to the next."""
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        places = [self._places[i] for i in self._rows[number]]
        return row_of([_read(place).cut(self._max_length) for place in places], self._max_length)


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Which sequences share a row: each, in order, goes to the first of the rows being filled that has room for it."""
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
    """A row, as `PackedRows` says, of sequences that fit into it."""
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


def _read(place: Place) -> Example:
    with place.shard.open("rb") as file:
        file.seek(place.offset)
        return Example.of(json.loads(file.readline())["sequences"][place.part])


def _draw(text: str) -> float:
    """A number from 0 up to 1 that belongs to the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
