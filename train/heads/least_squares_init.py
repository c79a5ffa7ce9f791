"""Least-squares initialisation of EAGLE heads.

The linear map from embedding and previous hidden state to the next hidden state is solved in seconds. It replaces the
training steps that would learn this map.

Legend: T positions of a text, D hidden size, E inputs (2 D).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sharesd.drafters.eagle.head import Eagle
from train.heads.teacher import Lesson


@torch.no_grad()
def begin_linear(head: Eagle, lessons: Iterable[Lesson], ridge: float = 1e-3) -> None:
    """Set fc to the best linear prediction of the target's hidden states.

    `ridge` is added to the variance of each input, as a share of it.
    """
    inputs, outputs = head.fc.in_features, head.fc.out_features
    moments = torch.zeros(inputs + 1, inputs + 1 + outputs, dtype=torch.float64)
    for lesson in lessons:
        counted_T = lesson.counted(0)
        embeds_TD, features_TD = head.embedding(lesson.tokens_1T)[0], head.fuse(lesson.features_1TF)[0]
        ones_T1 = torch.ones_like(embeds_TD[:, :1])
        known_TE = torch.cat([embeds_TD, features_TD, ones_T1], 1)[counted_T].double()
        moments += known_TE.T @ torch.cat([known_TE, lesson.teacher_TD[counted_T].double()], 1)
    weight_ED = solved(moments[:, : inputs + 1], moments[:, inputs + 1 :], ridge).to(head.fc.weight)
    head.fc.weight.copy_(weight_ED[:-1].T)
    head.fc.bias.copy_(weight_ED[-1])


def solved(squares_EE: Tensor, products_ED: Tensor, ridge: float) -> Tensor:
    """Return weights [E, D] from sums of x x' and x y'.

    The last input is the constant 1, without ridge. Inputs that are always 0 get weight 0.
    """
    sizes_E = squares_EE.diagonal().sqrt()
    scale_E = torch.where(sizes_E > 0, 1 / sizes_E, 0)
    scaled_EE = squares_EE * scale_E[:, None] * scale_E
    ridge_E = torch.full_like(scale_E, ridge).where(sizes_E > 0, 1)
    ridge_E[-1] = 0
    found_ED = torch.linalg.solve(scaled_EE + ridge_E.diag(), products_ED * scale_E[:, None])
    return found_ED * scale_E[:, None]
