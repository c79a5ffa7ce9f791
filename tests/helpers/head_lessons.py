"""Texts, teachers and frozen targets for tests of training heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sharesd.drafters.heads.head import Head
from tests.helpers.oracle import RAW as RAW
from train.data.loss_mask import Example
from train.data.packed_dataset import row_of
from train.heads.losses import Teacher
from train.heads.teacher import FrozenTarget

IDS = torch.tensor(sorted({7, 3, 31, 12, 0, 39, 22}))


def teacher_of(target: Any, ids_K: Tensor | None) -> Teacher:
    weight_VD = target.head.weight.clone()
    return Teacher(weight_VD if ids_K is None else weight_VD[ids_K], 0.0)


def frozen_for(head: Head, target: Any) -> FrozenTarget:
    return FrozenTarget(target, head.config.taps, 64, head.config.target_layers)


def row(*texts: tuple[list[int], list[tuple[int, int]]]) -> dict[str, Tensor]:
    return row_of([Example(*text) for text in texts], 64)


TEXTS = row(
    ([3, 17, 9, 4, 30, 8, 12, 1, 5, 6, 7, 2], [(3, 7), (9, 12)]), ([21, 4], [(1, 2)]), ([5, 6, 7, 8, 9], [(1, 5)])
)
