"""Acceptance of a head's chains on held-out texts, and the resulting speedup."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from sharesd.speculation.cost_model import Costs
from train.heads.draft_decoder import Learner, unroll
from train.heads.teacher import ROWS, FrozenTarget, Lesson


@dataclass(slots=True)
class Acceptance:
    """Greedy chains from each token: attempts and acceptances by position.

    A draft token is accepted if it is the target's most probable token. A chain continues after an accepted token only
    if the text has this token, since other continuations have no hidden states.
    """

    reached: list[int]
    accepted: list[int]

    @property
    def rates(self) -> list[float]:
        """Acceptance probability by position, given acceptance of all earlier ones."""
        return [yes / all_ if all_ else 0.0 for yes, all_ in zip(self.accepted, self.reached, strict=True)]

    @property
    def taus(self) -> list[float]:
        """Return tokens per round of chains of 1, 2, ... draft tokens."""
        return list(accumulate(accumulate(self.rates, mul), initial=1.0))[1:]


@torch.no_grad()
def acceptance(
    head: Learner,
    frozen: FrozenTarget,
    rows: Iterable[dict[str, Tensor]],
    length: int,
    on_lesson: Callable[[Lesson], object] = lambda lesson: None,
) -> Acceptance:
    """Return acceptance of chains; call `on_lesson` with each lesson."""
    found = Acceptance([0] * length, [0] * length)
    for row in rows:
        for lesson in frozen.lessons(row):
            _add(found, head, frozen, lesson)
            on_lesson(lesson)
    return found


def _add(found: Acceptance, head: Learner, frozen: FrozenTarget, lesson: Lesson) -> None:
    unrolled = unroll(head, lesson, len(found.reached))
    choices_T = frozen.choices(lesson.teacher_TD)
    on_text_T = choices_T == lesson.foretold_T
    alive_T = torch.ones_like(on_text_T)  # indexed by the position that drafts next
    for step, states_1TD in enumerate(unrolled):
        reached_T = alive_T & lesson.counted(step)
        drafts_T = torch.full_like(choices_T, -1)
        drafts_T[reached_T] = _drafts(head, frozen, states_1TD[0, reached_T])
        accepted_T = drafts_T == choices_T
        found.reached[step] += int(reached_T.sum())
        found.accepted[step] += int(accepted_T.sum())
        alive_T = (accepted_T & on_text_T).roll(1)
        alive_T[0] = False


def _drafts(head: Learner, frozen: FrozenTarget, states_ND: Tensor) -> Tensor:
    """Return the most probable tokens [N], as ids of the target."""
    hidden_ND = head.before_logits(states_ND)
    if head.lm_head is None:
        return frozen.choices(hidden_ND)
    narrow_N = torch.cat([head.lm_head(part).argmax(1) for part in hidden_ND.split(ROWS)])
    return narrow_N if head.ids is None else head.get_buffer("ids")[narrow_N]


def best_chain(taus: list[float], costs: Costs) -> tuple[int, float]:
    """Return the best chain length and its speedup; (0, 1.0) without gain."""
    plain = costs.of_step(1)
    gains = [1.0]
    for length, tau in enumerate(taus, 1):
        gains.append(tau * plain / (costs.chain.of_draft(length) + costs.of_step(1 + length)))
    length = max(range(len(gains)), key=gains.__getitem__)
    return length, gains[length]
