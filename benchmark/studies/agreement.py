"""How often quantized weights agree with the target: part of `sharesd tune`.

Drafts are measured as mode share makes the first of a round: over the target's KV, one token at a time. The target
answers once; all settings are compared with these answers, over their KV.

Legend: B rows of a batch, R rows whose answers have not ended, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from sharesd.models.decoder import Decoder
from sharesd.models.prefill import prefill, slots_for
from sharesd.startup.cost_profiler import is_native

if TYPE_CHECKING:
    from torch import Tensor

    from sharesd.runtime import Runtime


ROWS = 8
"""Answers that the C++ kernel follows together; compiled steps take the rows of the engine."""
RARE = 1e-6
"""Tokens that are less likely than this on both sides count as one token where sorting all would take most time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    num_tokens: int
    """Of greedy and sampled answers together."""
    greedy: float
    """Share of tokens of greedy answers that quantized weights choose as the target does."""
    overlap: float
    """Mean over tokens of sampled answers of the sum of the smaller probabilities at temperature 1.

    No rule of acceptance that keeps the distribution accepts a larger share.
    """
    same_noise: float
    """Mean probability, at temperature 1, that both choose one token with the same Gumbel noise.

    That is what `--acceptance match` accepts. It lies between overlap / (2 - overlap), more than which no draft can be
    sure of where the text must not depend on the drafter, and the overlap (Daliri et al. 2024, arXiv 2408.07978).
    """


class AnswerStep(NamedTuple):
    """A token of each answer, and what the target says after it."""

    tokens_B: Tensor
    is_live_B: Tensor
    """False where the answer has ended."""
    wanted: Tensor
    """Logits [R, V] of sampled answers, or the likeliest tokens [R] of greedy ones; on the CPU."""


class FollowedAnswers(NamedTuple):
    """Answers of the target that are followed together."""

    prompts: list[list[int]]
    """Token ids by row; those of rows without a prompt are empty."""
    steps: list[AnswerStep]
    kv: list[dict[str, Tensor]]
    """The target's KV of prompt and answer by row; none with recurrent layers, whose state has one place alone."""


@torch.inference_mode()
def answer(
    runtime: Runtime, prompts: Sequence[list[int]], max_new_tokens: int, seed: int | None = None
) -> list[FollowedAnswers]:
    """Return the target's answers up to their end: greedy, or sampled at temperature 1 with `seed`.

    `runtime`: of the native decoder.
    """
    assert isinstance(runtime.target, Decoder)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    eos_ids, found = torch.tensor(runtime.target.eos_ids), list[FollowedAnswers]()
    batch = max(ROWS, runtime.cache.batch) if is_native(runtime.target) else runtime.cache.batch
    for first in range(0, len(prompts), batch):
        here = list(prompts[first : first + batch])
        cache = runtime.step.new_cache(batch, slots_for(max(map(len, here)) + max_new_tokens))
        rows, steps = here + [[]] * (batch - len(here)), list[AnswerStep]()
        logits_BV = prefill(runtime.step, cache, rows, [0] * batch)
        is_live_B = torch.tensor([bool(row) for row in rows])
        for _ in range(max_new_tokens):
            tokens_B = logits_BV.argmax(-1)
            if generator is not None:
                chosen_B1 = torch.multinomial(logits_BV.float().cpu().softmax(-1), 1, generator=generator)
                tokens_B = chosen_B1[:, 0].to(tokens_B.device)
            is_live_B = is_live_B & ~torch.isin(tokens_B.cpu(), eos_ids)
            if not is_live_B.any():
                break
            logits_BV = runtime.step.forward(tokens_B[:, None], cache)[:, 0]
            cache.lengths.add_(1)
            wanted_BV = logits_BV if generator is not None else logits_BV.argmax(-1)
            steps.append(AnswerStep(tokens_B, is_live_B, wanted_BV.cpu()[is_live_B]))
        lengths = [len(row) + len(steps) for row in rows]
        kv = [cache.copy_kv_of(row, length) for row, length in enumerate(lengths)] if cache.recurrent is None else []
        found.append(FollowedAnswers(rows, steps, kv))
    return found


def measure_agreement(
    runtime: Runtime, greedy: Sequence[FollowedAnswers], sampled: Sequence[FollowedAnswers]
) -> Agreement:
    """Compare drafts with the target's answers; `runtime`: with mode share, of the target that gave them."""
    equal, num_greedy, overlap, same_noise, num_sampled = 0, 0, 0.0, 0.0, 0
    for drafts_RV, wanted_R in _drafts(runtime, greedy):
        equal += int((drafts_RV.argmax(-1) == wanted_R).sum())
        num_greedy += len(wanted_R)
    for drafts_RV, wanted_RV in _drafts(runtime, sampled):
        p_RV, q_RV = wanted_RV.float().softmax(-1), drafts_RV.softmax(-1)
        overlap += float(torch.minimum(p_RV, q_RV).sum())
        same_noise += float(equal_with_same_noise(p_RV, q_RV).sum())
        num_sampled += len(wanted_RV)
    return Agreement(
        num_tokens=num_greedy + num_sampled,
        greedy=equal / max(num_greedy, 1),
        overlap=overlap / max(num_sampled, 1),
        same_noise=same_noise / max(num_sampled, 1),
    )


@torch.inference_mode()
def _drafts(runtime: Runtime, answers: Sequence[FollowedAnswers]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits [R, V] of drafts after each token, and what the target says there."""
    for prompts, steps, kv in answers:
        lengths_B = torch.tensor([len(row) for row in prompts])
        cache = runtime.step.new_cache(len(prompts), slots_for(int(lengths_B.max()) + len(steps)))
        if not kv:
            prefill(runtime.step, cache, prompts, [0] * len(prompts))
        for row, tensors in enumerate(kv):
            cache.write_kv_of(row, int(lengths_B[row]) + len(steps), tensors)
        # A draft writes its own KV over the target's. From the last token on, no other draft reads it.
        order = reversed(range(len(steps))) if kv else range(len(steps))
        for place in order:
            tokens_B, is_live_B, wanted = steps[place]
            cache.lengths.copy_(lengths_B + place)
            with runtime.model.switch.quantized_weights():
                drafts_BV = runtime.step.forward(tokens_B[:, None], cache)[:, 0]
            if not kv:
                runtime.step.forward(tokens_B[:, None], cache)
            yield drafts_BV.float().cpu()[is_live_B], wanted


def equal_with_same_noise(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """Return, for each row, the probability [B] that argmax(log p + g) equals argmax(log q + g), g Gumbel noise.

    Both choose token i with probability 1 / sum_j max(p_j / p_i, q_j / q_i). Where tokens are sorted by q / p, the
    larger ratio is that of p up to i and that of q after it. Tokens that are rare on both sides count as one: together
    they seldom have more than 1e-3, of which little changes.
    """
    return torch.stack([_equal_in_row(p_V, q_V) for p_V, q_V in zip(p_BV, q_BV, strict=True)])


def _equal_in_row(p_V: Tensor, q_V: Tensor) -> Tensor:
    counts = ((p_V > RARE) | (q_V > RARE)).nonzero()[:, 0]
    kept = [x_V[counts].double() for x_V in (p_V, q_V)]
    p_V, q_V = (torch.cat([x_V, (1 - x_V.sum(0, keepdim=True)).clamp(min=0)]) for x_V in kept)
    order_V = (q_V / p_V).argsort()
    p_V, q_V = p_V[order_V], q_V[order_V]
    after_V = q_V.sum() - q_V.cumsum(0)
    return (p_V * q_V / (p_V.cumsum(0) * q_V + after_V.clamp(min=0) * p_V)).nan_to_num(nan=0.0).sum()
