"""Losses of heads: divergence of draft distributions, distance of hidden states.

The LM head over a large vocabulary takes several times as long as the head's block. Logits are therefore computed only
for positions in the loss, in blocks, and not stored. The divergence's gradient has a closed form (draft minus target),
and is accumulated block by block.

Parallel heads train the next token at every position. Masks for further tokens follow a random share of positions, the
anchors.

Legend: S unrolled steps, N positions in the loss, M states of a block (S * its positions), D hidden size, K draft
tokens that there are, T positions of a text, A anchors, G draft tokens of a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sharesd.drafters.heads.head import FeatureHead
from sharesd.drafters.parallel.head import Parallel
from train.heads.draft_decoder import DraftDecoder, Learner, unroll
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


LOGITS = 2**22
"""Maximum number of logits per block, to fit a large CPU cache."""
WHOLE = 64
"""Multiple to which positions are padded, to limit the number of shapes.

Libraries prepare matrix products for each shape.
"""


class Teacher(NamedTuple):
    """The target's distribution over the draft tokens."""

    weight_KD: Tensor
    """Rows of the target's LM head, in the dtype of matrix products."""
    softcap: float
    """Soft cap of the target's logits; 0: none."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Return logits [N, K] of hidden states after the last norm."""
        logits_NK = hidden_ND @ self.weight_KD.T
        return self.softcap * torch.tanh(logits_NK / self.softcap) if self.softcap else logits_NK


class Losses(NamedTuple):
    """Weighted sums over positions."""

    divergence: Tensor
    """KL(target || head) over the draft tokens, in nats."""
    feature: Tensor
    """Smooth L1 distance to the target's hidden states, mean over entries."""
    rejection: Tensor
    """Total variation: probability that a sampled draft token is rejected."""


def losses(
    head: Learner,
    lessons: Sequence[Lesson],
    teacher: Teacher,
    step_weights: Sequence[float],
    *,
    feature: bool = True,
    rejection: bool = False,
) -> Losses:
    """Return the losses of unrolled steps, one per weight.

    `step_weights` weigh each position of a step. Without `feature` or `rejection` that loss is 0 and is not computed.
    """
    states_SND, teacher_ND, weights_SN = _made(head, lessons, step_weights)
    own = teacher.weight_KD if head.lm_head is None else head.lm_head.weight
    more = -states_SND.shape[1] % WHOLE
    divergence, rejected = _Distances.apply(  # type: ignore[no-untyped-call]
        F.pad(head.before_logits(states_SND), (0, 0, 0, more)),
        own,
        F.pad(teacher_ND, (0, 0, 0, more)),
        teacher,
        F.pad(weights_SN, (0, more)),
        rejection,
    )
    if not feature or isinstance(head, DraftDecoder):  # whose states are not meant to be the target's
        return Losses(divergence, torch.zeros_like(divergence), rejected)
    distances_SND = F.smooth_l1_loss(states_SND, teacher_ND.expand_as(states_SND), reduction="none")
    return Losses(divergence, (distances_SND.mean(2) * weights_SN).sum(), rejected)


def _made(head: Learner, lessons: Sequence[Lesson], step_weights: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Return states [S, N, D], target [N, D], weights [S, N].

    Weights are 0 outside of the loss.
    """
    if isinstance(head, Parallel):
        found = [draft_states(head, lesson, step_weights) for lesson in lessons]
        states_ND, weights_N = torch.cat([one[0] for one in found]), torch.cat([one[2] for one in found])
        teacher = [lesson.teacher_TD[at_N] for lesson, (_, at_N, _) in zip(lessons, found, strict=True)]
        return states_ND[None].to(teacher[0].dtype), torch.cat(teacher), weights_N[None]
    steps = range(len(step_weights))
    counted_ST = torch.cat([torch.stack([lesson.counted(step) for step in steps]) for lesson in lessons], 1)
    at_N = counted_ST[0].nonzero()[:, 0]  # all places of later steps are among these
    states_SND = torch.stack([states_1TD[0, at_N] for states_1TD in _unrolled(head, lessons, len(steps))])
    teacher_ND = torch.cat([lesson.teacher_TD for lesson in lessons])[at_N]
    weights_S1 = torch.tensor(step_weights, dtype=teacher_ND.dtype, device=at_N.device)[:, None]
    return states_SND.to(teacher_ND.dtype), teacher_ND, counted_ST[:, at_N] * weights_S1


def _unrolled(head: Learner, lessons: Sequence[Lesson], steps: int) -> list[Tensor]:
    """Yield states [1, T, D] of all texts concatenated, step by step."""
    if not isinstance(head, FeatureHead):
        each = [unroll(head, lesson, steps) for lesson in lessons]
        return [torch.cat(states, 1) for states in zip(*each, strict=True)]
    lengths = [len(lesson.foretold_T) for lesson in lessons]
    more = -sum(lengths) % WHOLE
    tokens_1T = F.pad(torch.cat([lesson.tokens_1T for lesson in lessons], 1), (0, more))
    features_1TF = F.pad(torch.cat([lesson.features_1TF for lesson in lessons], 1), (0, 0, 0, more))
    return head.unroll_texts(tokens_1T, features_1TF, steps, [*lengths, more])


class _Distances(torch.autograd.Function):
    """Weighted sums of KL(target || head) and of total variation."""

    @staticmethod
    def forward(
        ctx: Any,
        states_SND: Tensor,
        weight_KD: Tensor,
        teacher_ND: Tensor,
        teacher: Teacher,
        weights_SN: Tensor,
        rejection: bool,
    ) -> tuple[Tensor, Tensor]:
        totals = weights_SN.new_zeros(2)
        S, N, _ = states_SND.shape
        size = max(1, LOGITS // (S * len(weight_KD)) // WHOLE) * WHOLE
        wide, device = weights_SN.dtype, states_SND.device.type
        if torch.is_autocast_enabled(device):
            weight_KD = weight_KD.to(torch.get_autocast_dtype(device))  # once, not in every product
        gradients = [_Gradient(states_SND, weight_KD, ctx.needs_input_grad[1]) for _ in range(1 + rejection)]
        for part in (slice(first, first + size) for first in range(0, N, size)):
            states_MD = states_SND[:, part].flatten(0, 1).to(weight_KD.dtype)  # one product is faster than S
            weights = weights_SN[:, part]
            target_NK = teacher.logits(teacher_ND[part]).log_softmax(1, dtype=wide)
            prob_NK = target_NK.exp()
            draft_SNK = (states_MD @ weight_KD.T).log_softmax(1, dtype=wide).unflatten(0, (S, -1))
            divergence_SN = (target_NK * prob_NK).sum(1) - (draft_SNK * prob_NK).sum(2)
            totals[0] += (divergence_SN * weights).sum()
            draft_SNK.exp_()
            if rejection:
                kept_SNK = torch.where(draft_SNK < prob_NK, draft_SNK, 0)
                kept_SN = kept_SNK.sum(2)
                totals[1] += ((1 - torch.minimum(draft_SNK, prob_NK).sum(2)) * weights).sum()
                gradients[1].add(part, draft_SNK * kept_SN[..., None] - kept_SNK, states_MD, weight_KD, weights)
            gradients[0].add(part, draft_SNK.sub_(prob_NK), states_MD, weight_KD, weights)
        ctx.save_for_backward(*(tensor for gradient in gradients for tensor in (gradient.states, gradient.weight)))
        return totals[0], totals[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        of_states, of_weight = saved[0] * grads[0], None if saved[1] is None else saved[1].to(grads[0]) * grads[0]
        if len(saved) > 2:
            of_states += saved[2] * grads[1]
            of_weight = None if of_weight is None else of_weight + saved[3].to(grads[1]) * grads[1]
        return of_states, of_weight, None, None, None, None


class _Gradient:
    """Gradient accumulator for the states, and for a trained LM head."""

    def __init__(self, states_SND: Tensor, weight_KD: Tensor, learns: bool) -> None:
        self.states = torch.empty_like(states_SND)
        self.weight = torch.zeros_like(weight_KD) if learns else None

    def add(self, part: slice, grad_SNK: Tensor, states_MD: Tensor, weight_KD: Tensor, weights: Tensor) -> None:
        """Add a block's gradient with respect to its logits, weighted by position."""
        grad_MK = grad_SNK.to(states_MD.dtype).flatten(0, 1)
        self.states[:, part] = (grad_MK @ weight_KD).unflatten(0, (weights.shape[0], -1)) * weights[..., None]
        if self.weight is not None:
            self.weight.addmm_(grad_MK.T, (states_MD * weights.flatten()[:, None]).to(states_MD.dtype))
