"""How far a head's chains would be accepted on texts that it was not trained on, and what that would gain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from sharesd.speculation.cost_model import Costs
from sharesd.speculation.draft_tree import chain
from train.heads.draft_decoder import Learner, unroll
from train.heads.teacher import ROWS, FrozenTarget, Lesson


@dataclass(slots=True)
class Acceptance:
    """Of chains of the likeliest guesses, one from each place: how many came to each position, and what was accepted
    there, since the target finds the same token likeliest.

    Behind an accepted guess a chain is followed only where the text goes on with it, too: in sampled answers others go
    off into texts that nobody has.
    """

    reached: list[int]
    accepted: list[int]

    @property
    def rates(self) -> list[float]:
        """By position: probability of acceptance, given that those before were accepted."""
        return [yes / all_ if all_ else 0.0 for yes, all_ in zip(self.accepted, self.reached, strict=True)]

    @property
    def taus(self) -> list[float]:
        """Tokens per round of chains of 1, 2, ... guesses, where rounds begin at all places alike."""
        return list(accumulate(accumulate(self.rates, mul), initial=1.0))[1:]


@torch.no_grad()
def acceptance(head: Learner, frozen: FrozenTarget, rows: Iterable[dict[str, Tensor]], length: int) -> Acceptance:
    """Of chains of this length, on packed rows."""
    found = Acceptance([0] * length, [0] * length)
    for row in rows:
        for lesson in frozen.lessons(row):
            _add(found, head, frozen, lesson)
    return found


def _add(found: Acceptance, head: Learner, frozen: FrozenTarget, lesson: Lesson) -> None:
    unrolled = unroll(head, lesson, len(found.reached))
    choices_T = frozen.choices(lesson.teacher_TD)
    on_text_T = choices_T == lesson.foretold_T
    alive_T = torch.ones_like(on_text_T)  # by where the coming guess is made
    for step, states_1TD in enumerate(unrolled):
        reached_T = alive_T & lesson.counted(step)
        guesses_T = torch.full_like(choices_T, -1)
        guesses_T[reached_T] = _guesses(head, frozen, states_1TD[0, reached_T])
        accepted_T = guesses_T == choices_T
        found.reached[step] += int(reached_T.sum())
        found.accepted[step] += int(accepted_T.sum())
        alive_T = (accepted_T & on_text_T).roll(1)
        alive_T[0] = False


def _guesses(head: Learner, frozen: FrozenTarget, states_ND: Tensor) -> Tensor:
    """The likeliest tokens [N], by their ids in the target."""
    hidden_ND = head.before_logits(states_ND)
    if head.lm_head is None:
        return frozen.choices(hidden_ND)
    narrow_N = torch.cat([head.lm_head(part).argmax(1) for part in hidden_ND.split(ROWS)])
    return narrow_N if head.ids is None else head.get_buffer("ids")[narrow_N]


def best_chain(taus: list[float], costs: Costs) -> tuple[int, float]:
    """The length of the chains that decode fastest, and how many times as fast as plainly; 0 and 1.0: none pays."""
    plain = costs.of_step(1)
    gains = [1.0]
    for length, tau in enumerate(taus, 1):
        gains.append(tau * plain / (costs.of_draft(chain(length)) + costs.of_step(1 + length)))
    length = max(range(len(gains)), key=gains.__getitem__)
    return length, gains[length]
