"""Training positions of parallel heads.

The next token is trained at every position. Masks for further tokens follow a random share of positions, the anchors.

Legend: T positions of a text, A anchors, G draft tokens, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sharesd.drafters.parallel.head import Parallel
from train.heads.teacher import Lesson


def with_anchors(lesson: Lesson, share: float, dice: torch.Generator) -> Lesson:
    """Return the lesson with masks after a random share of eligible positions."""
    begun_A = lesson.counted(1).nonzero()[:, 0] - 1
    drawn = torch.randperm(len(begun_A), generator=dice)[: math.ceil(share * len(begun_A))]
    return lesson._replace(anchors_A=begun_A[drawn.sort().values.to(begun_A.device)])


def draft_states(head: Parallel, lesson: Lesson, step_weights: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Return states [G, D], positions [G] and weights [G] of draft tokens."""
    assert lesson.anchors_A is not None
    anchors_A, T = lesson.anchors_A, len(lesson.foretold_T)
    states_1TD, masks_1AMD = head.foresee(lesson.tokens_1T, lesson.features_1TF, anchors_A, len(step_weights) - 1)
    places, states, weights = [], [], []
    for step, weight in enumerate(step_weights):
        counted_T = lesson.counted(step)
        if step == 0:
            places.append(counted_T.nonzero()[:, 0])
            states.append(states_1TD[0, places[-1]])
        else:
            here_A = counted_T[(anchors_A + step).clamp(max=T - 1)] & (anchors_A + step < T)
            places.append(anchors_A[here_A] + step)
            states.append(masks_1AMD[0, here_A, step - 1])
        weights.append(torch.full((len(places[-1]),), weight, dtype=lesson.teacher_TD.dtype, device=counted_T.device))
    return torch.cat(states), torch.cat(places), torch.cat(weights)
