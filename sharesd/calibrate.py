"""Warming up an engine: every form of a round runs until it is compiled, then its time is taken for the policy."""

from __future__ import annotations

from dataclasses import replace

from sharesd.config import SamplingParams
from sharesd.engine import Engine
from sharesd.policy import Costs

ROUNDS = 2
"""Rounds of each form, at least, that run before the clock and on it."""


def warm_up(engine: Engine, params: SamplingParams) -> None:
    """Compile what this way of sampling needs; where the policy chooses lengths, give it fresh costs."""
    policy = engine.policy(params)
    lengths = _lengths(engine.num_draft) if policy.chooses else [engine.num_draft]
    for num_draft in lengths:
        _run(engine, params, num_draft)
    if policy.chooses:
        costs = Costs()
        for _ in range(ROUNDS):
            for num_draft in lengths:
                draft_s, step_s = _run(engine, params, num_draft)
                costs.step[1 + num_draft] = min(step_s, costs.step.get(1 + num_draft, step_s))
                if num_draft:
                    each = draft_s / num_draft
                    costs.draft = min(each, costs.draft or each)
        policy.use(costs)
    engine.forget()


def _run(engine: Engine, params: SamplingParams, num_draft: int) -> tuple[float, float]:
    """Seconds of drafting and of the rest, per round with drafts of this length."""
    policy = engine.policy(params)
    before, policy.pinned = policy.pinned, num_draft
    params = replace(params, max_new_tokens=1 + ROUNDS * (1 + num_draft), ignore_eos=True, stop=(), stop_token_ids=())
    prompt = [i % engine.target.vocab_size for i in range(min(8, engine.max_context // 2))]
    try:
        engine.complete([prompt] * engine.cache.batch, params)
    finally:
        policy.pinned = before
    stats = engine.stats
    return stats.draft_s / stats.steps, (stats.verify_s + stats.overhead_s) / stats.steps


def _lengths(most: int) -> list[int]:
    """0, 1, 2, 4 ... and the longest: between them costs are nearly linear."""
    doubling = [2**i for i in range(most.bit_length()) if 2**i < most]
    return [0, *doubling, most]
