"""What a head is trained to lower: how far its guesses are from the target's, and its states from the target's.

The LM head over a large vocabulary costs several times what the head's block does. So logits are made only where they
count, in blocks, and never kept: the gradient of the divergence is known in closed form (guess minus target), and is
taken block by block with the values.

Legend: S unrolled steps, N places that count, D hidden size, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sharesd.models.heads.head import Head
from sharesd.models.heads.parallel import Parallel
from train.heads.anchors import guesses
from train.heads.frozen import Lesson

LOGITS = 2**21
"""Logits of the head that are made at a time, at most: what a large cache holds, since they are gone through often."""


class Teacher(NamedTuple):
    """How the target chooses among the draft tokens."""

    weight_KD: Tensor
    """Their rows of its LM head, in the dtype of matrix products."""
    softcap: float
    """Cap of its logits; 0 = none."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, K] of hidden states behind its last norm."""
        logits_NK = hidden_ND @ self.weight_KD.T
        return self.softcap * torch.tanh(logits_NK / self.softcap) if self.softcap else logits_NK


class Losses(NamedTuple):
    """Sums over places, weighted."""

    divergence: Tensor
    """Kullback-Leibler, from the target's choice among the draft tokens to the head's, in nats."""
    feature: Tensor
    """Smooth L1 between states and the target's hidden states, mean over their entries."""


def losses(head: Head, lesson: Lesson, teacher: Teacher, step_weights: Sequence[float]) -> Losses:
    """Of as many unrolled steps as there are weights; `step_weights` are those of each place of a step."""
    if isinstance(head, Parallel):
        states_ND, at_N, weights_N = guesses(head, lesson, step_weights)
        states_SND, weights_SN = states_ND[None].to(lesson.teacher_TD.dtype), weights_N[None]
    else:
        states_SND, at_N, weights_SN = _unrolled(head, lesson, step_weights)
    teacher_ND = lesson.teacher_TD[at_N]
    own = teacher.weight_KD if head.lm_head is None else head.lm_head.weight
    divergence = _Divergence.apply(head.before_logits(states_SND), own, teacher_ND, teacher, weights_SN)
    distances_SND = F.smooth_l1_loss(states_SND, teacher_ND.expand_as(states_SND), reduction="none")
    return Losses(divergence, (distances_SND.mean(2) * weights_SN).sum())


def _unrolled(head: Head, lesson: Lesson, step_weights: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """States [S, N, D] of chains, the places [N] whose tokens are foretold, and weights [S, N], 0 where they do not
    count.
    """
    counted_ST = torch.stack([lesson.counted(step) for step in range(len(step_weights))])
    at_N = counted_ST[0].nonzero()[:, 0]  # all places of later steps are among these
    unrolled = head.unroll(lesson.tokens_1T, lesson.features_1TF, len(step_weights))
    states_SND = torch.stack([states_1TD[0, at_N] for states_1TD in unrolled]).to(lesson.teacher_TD.dtype)
    weights_S1 = torch.tensor(step_weights, dtype=states_SND.dtype, device=at_N.device)[:, None]
    return states_SND, at_N, counted_ST[:, at_N] * weights_S1


class _Divergence(torch.autograd.Function):
    """Sum over steps and places of weight * KL(target || head)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, states_SND: Tensor, weight_KD: Tensor, teacher_ND: Tensor, teacher: Teacher, weights_SN: Tensor
    ) -> Tensor:
        total = weights_SN.new_zeros(())
        grad_states_SND = torch.empty_like(states_SND)
        grad_weight_KD = torch.zeros_like(weight_KD) if ctx.needs_input_grad[1] else None
        S, N, _ = states_SND.shape
        size = max(1, LOGITS // (S * len(weight_KD)))
        wide = weights_SN.dtype
        if torch.is_autocast_enabled(states_SND.device.type):
            weight_KD = weight_KD.to(torch.get_autocast_dtype(states_SND.device.type))  # once, not in every product
        for part in (slice(first, first + size) for first in range(0, N, size)):
            states, weights_SN1 = states_SND[:, part].to(weight_KD.dtype), weights_SN[:, part, None]
            target_NK = teacher.logits(teacher_ND[part]).log_softmax(1, dtype=wide)
            prob_NK = target_NK.exp()
            guess_SNK = (states @ weight_KD.T).log_softmax(2, dtype=wide)
            divergence_SN = (target_NK * prob_NK).sum(1) - (guess_SNK * prob_NK).sum(2)
            total += (divergence_SN * weights_SN[:, part]).sum()
            grad_SNK = guess_SNK.exp_().sub_(prob_NK).to(states.dtype)
            grad_states_SND[:, part] = (grad_SNK @ weight_KD) * weights_SN1
            if grad_weight_KD is not None:
                grad_weight_KD += grad_SNK.flatten(0, 1).T @ (states * weights_SN1).to(states.dtype).flatten(0, 1)
        ctx.save_for_backward(grad_states_SND, grad_weight_KD)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_states, of_weight = ctx.saved_tensors
        return grad * of_states, None if of_weight is None else grad * of_weight, None, None, None
