"""What `train generate` wrote, packed into rows: nothing lost or mixed up, the same at every start."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from train.data.loss_mask import Example
from train.data.packed_dataset import OPEN_ROWS, PADDING, PackedRows, pack, read_split
from train.data.shards import AnswerShard

LENGTH = 32


def write(folder: Path, world: int, num: int = 60) -> list[Example]:
    """Answers to half as many prompts, two each, by so many processes; returns all sequences."""
    folder.mkdir()
    dice, every = random.Random(0), []
    shards = [AnswerShard(folder, rank, world) for rank in range(world)]
    for number in range(num):
        sequences = []
        for _ in range(1 + (number % 5 == 0)):
            prompt, answer = dice.randint(1, 20), dice.randint(1, 25)
            ids = [dice.randrange(1, 99) for _ in range(prompt + answer)]
            sequences.append(Example(ids, [(prompt, prompt + answer)]))
        every += sequences
        record = {
            "index": number // 2,
            "sample": number % 2,
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": f"prompt {number // 2}"}],
            "sequences": [example._asdict() for example in sequences],
        }
        shards[number % world].add(record)
    return every


def segments(row: dict[str, Tensor]) -> list[Example]:
    """A row taken apart again."""
    found = []
    for segment in range(int(row["segment_ids"].max()) + 1):
        here = row["segment_ids"] == segment
        ids, mask = row["token_ids"][here].tolist(), row["loss_mask"][here].tolist()
        assert row["position_ids"][here].tolist() == list(range(len(ids)))
        first = mask.index(True)
        assert mask == [False] * first + [True] * (len(mask) - first), "answers end these sequences"
        found.append(Example(ids, [(first, len(ids))]))
    padding = row["segment_ids"] == PADDING
    assert not row["loss_mask"][padding].any() and int(padding.sum()) + sum(len(e.token_ids) for e in found) == LENGTH
    return found


def test_every_sequence_is_in_one_row_and_cut_at_its_length(tmp_path: Path) -> None:
    every = write(tmp_path / "a", 1)
    split = read_split(tmp_path / "a", LENGTH, held_out=0)
    assert split.held_out == []
    rows = PackedRows(split.train, LENGTH)
    found = Counter(str(example) for i in range(len(rows)) for example in segments(rows[i]))
    assert found == Counter(str(example.cut(LENGTH)) for example in every)
    assert any(len(example.token_ids) > LENGTH for example in every) and len(rows) < len(every)


def test_rows_do_not_depend_on_who_wrote_the_answers(tmp_path: Path) -> None:
    def rows(folder: Path, epoch: int, seed: int = 0) -> list[list[int]]:
        packed = PackedRows(read_split(folder, LENGTH).train, LENGTH, seed=seed)
        packed.set_epoch(epoch)
        return [packed[i]["token_ids"].tolist() for i in range(len(packed))]

    for world in (1, 3):
        write(tmp_path / str(world), world)
    first = rows(tmp_path / "1", 0)
    assert first == rows(tmp_path / "3", 0)
    second = rows(tmp_path / "1", 1)
    assert second == rows(tmp_path / "3", 1) and second != first != rows(tmp_path / "1", 0, seed=1)
    assert Counter(token for row in first for token in row if token) == Counter(t for row in second for t in row if t)


def test_held_out_are_whole_prompts_whatever_else_is_there(tmp_path: Path) -> None:
    write(tmp_path / "few", 1, 100)
    write(tmp_path / "many", 2, 400)
    few, many = (read_split(tmp_path / name, LENGTH, held_out=0.2) for name in ("few", "many"))
    held_out = {place.number for place in many.held_out}
    assert held_out.isdisjoint(place.number for place in many.train)
    assert {place.number for place in few.held_out} == {number for number in held_out if number < 50}
    assert 0.1 < len(held_out) / 200 < 0.3


def test_sequences_without_loss_in_reach_are_left_out(tmp_path: Path) -> None:
    every = write(tmp_path / "a", 1)
    split = read_split(tmp_path / "a", 10, held_out=0.5)
    assert (
        len(split.train) + len(split.held_out) == sum(example.cut(10).num_in_loss > 0 for example in every) < len(every)
    )
    with pytest.raises(ValueError, match="a sequence has 10 tokens and rows have 9"):
        PackedRows(split.train, 9)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no answer within 10 tokens; raise --max-length"):
        read_split(tmp_path / "empty", 10)


def test_packing_fills_rows() -> None:
    dice = random.Random(0)
    lengths = [dice.randint(1, 100) for _ in range(2000)]
    rows = pack(lengths, 256)
    assert sorted(number for row in rows for number in row) == list(range(2000))
    assert all(sum(lengths[i] for i in row) <= 256 for row in rows)
    assert sum(lengths) / (256 * len(rows)) > 0.97
    assert pack([5] * (OPEN_ROWS + 9), 9) == [[i] for i in range(OPEN_ROWS + 9)]
    assert pack([], 9) == []


def test_rows_go_through_a_loader(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    rows = PackedRows(read_split(tmp_path / "a", LENGTH, held_out=0).train, LENGTH, shuffle=False)
    [batch, *_] = torch.utils.data.DataLoader(rows, batch_size=4)
    assert {name: tensor.shape for name, tensor in batch.items()} == dict.fromkeys(
        ("token_ids", "position_ids", "segment_ids", "loss_mask"), (4, LENGTH)
    )
    before = [rows[i]["token_ids"].tolist() for i in range(len(rows))]
    rows.set_epoch(3)
    assert before == [rows[i]["token_ids"].tolist() for i in range(len(rows))], "unshuffled"
