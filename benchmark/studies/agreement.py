"""How often quantized weights agree with the target: part of `sharesd tune`.

Drafts are measured as mode share makes the first of a round: over the target's KV, one token at a time.

Legend: B rows of a batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    greedy: float
    """Share of tokens that quantized weights choose as the target does, at temperature 0."""
    overlap: float
    """Mean over tokens of the sum of the smaller probabilities at temperature 1.

    No rule of acceptance that keeps the distribution accepts a larger share.
    """
    same_noise: float
    """Mean probability, at temperature 1, that both choose one token with the same Gumbel noise.

    That is what `--acceptance match` accepts. It lies between overlap / (2 - overlap), more than which no draft can be
    sure of where the text must not depend on the drafter, and the overlap (Daliri et al. 2024, arXiv 2408.07978).
    """


def measure_agreement(
    runtime: Runtime, prompts: Sequence[list[int]], max_new_tokens: int, seed: int | None = None
) -> Agreement:
    """Compare drafts with the target along its answers, up to their end.

    `runtime`: with mode share, on the native decoder. Answers are greedy, or sampled at temperature 1 with `seed`.
    """
    assert isinstance(runtime.target, Decoder)
    equal, overlap, same_noise, count = 0, 0.0, 0.0, 0
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        batch = max(ROWS, runtime.cache.batch) if is_native(runtime.target) else runtime.cache.batch
        for first in range(0, len(prompts), batch):
            here = prompts[first : first + batch]
            cache = runtime.step.new_cache(batch, slots_for(max(map(len, here)) + max_new_tokens))
            rows = [list(here[row]) if row < len(here) else [] for row in range(batch)]
            logits_BV = prefill(runtime.step, cache, rows, [0] * batch)
            is_live_B = torch.tensor([bool(row) for row in rows])
            for _ in range(max_new_tokens):
                tokens_B = logits_BV.argmax(-1)
                if generator is not None:
                    chosen_B1 = torch.multinomial(logits_BV.float().cpu().softmax(-1), 1, generator=generator)
                    tokens_B = chosen_B1[:, 0].to(tokens_B.device)
                is_live_B &= ~torch.isin(tokens_B.cpu(), torch.tensor(runtime.target.eos_ids))
                if not is_live_B.any():
                    break
                with runtime.model.switch.quantized_weights():
                    drafts_BV = runtime.step.forward(tokens_B[:, None], cache)[:, 0].float().cpu()[is_live_B]
                logits_BV = runtime.step.forward(tokens_B[:, None], cache)[:, 0]
                cache.lengths.add_(1)
                wanted_BV = logits_BV.float().cpu()[is_live_B]
                equal += int((drafts_BV.argmax(-1) == wanted_BV.argmax(-1)).sum())
                p_BV, q_BV = wanted_BV.softmax(-1), drafts_BV.softmax(-1)
                overlap += float(torch.minimum(p_BV, q_BV).sum())
                same_noise += float(equal_with_same_noise(p_BV, q_BV).sum())
                count += len(wanted_BV)
    means = [total / max(count, 1) for total in (equal, overlap, same_noise)]
    return Agreement(num_tokens=count, greedy=means[0], overlap=means[1], same_noise=means[2])


def equal_with_same_noise(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """Return, for each row, the probability [B] that argmax(log p + g) equals argmax(log q + g), g Gumbel noise.

    Both choose token i with probability 1 / sum_j max(p_j / p_i, q_j / q_i). Where tokens are sorted by q / p, the
    larger ratio is that of p up to i and that of q after it. Tokens that are rare on both sides count as one: together
    they seldom have more than 1e-3, of which little changes.
    """
    return torch.stack([_equal_in_row(p_V, q_V) for p_V, q_V in zip(p_BV, q_BV, strict=True)])


def _equal_in_row(p_V: Tensor, q_V: Tensor) -> Tensor:
    counts_V = (p_V > RARE) | (q_V > RARE)
    p_V, q_V = (torch.cat([x_V[counts_V], x_V[~counts_V].sum()[None]]).double() for x_V in (p_V, q_V))
    order_V = (q_V / p_V).argsort()
    p_V, q_V = p_V[order_V], q_V[order_V]
    after_V = q_V.sum() - q_V.cumsum(0)
    return (p_V * q_V / (p_V.cumsum(0) * q_V + after_V.clamp(min=0) * p_V)).nan_to_num(nan=0.0).sum()
