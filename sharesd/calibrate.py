"""Warming up an engine: every form of a round runs until it is compiled, then rounds are timed for the policy."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from sharesd.config import SamplingParams
from sharesd.engine import Engine
from sharesd.policy import Costs
from sharesd.tree import DraftTree

REPEATS = 3
"""Times that a step is timed; the quickest counts."""


def warm_up(engine: Engine, params: SamplingParams) -> None:
    """Compile what this way of sampling needs; where the policy chooses lengths, give it fresh costs."""
    policy, most = engine.way(params).policy, engine.num_draft
    short = replace(params, ignore_eos=True, stop=(), stop_token_ids=())
    lengths = range(most + 1) if engine.capture and policy.chooses else {0, most} if policy.chooses else {most}
    prompt = [i % engine.target.vocab_size for i in range(min(8, engine.max_context // 2))]
    before = policy.pinned
    for num_draft in lengths:
        policy.pinned = num_draft
        engine.complete([prompt] * engine.cache.batch, replace(short, max_new_tokens=3 * (1 + num_draft)))
    policy.pinned = before
    if policy.chooses or (engine.drafter is not None and engine.drafter.on_host):
        policy.use(measure_costs(engine, params))
    engine.forget()


@torch.inference_mode()
def measure_costs(engine: Engine, params: SamplingParams) -> Costs:
    """Seconds of steps and draft steps, behind whatever text the engine decoded last. Leaves that text alone."""
    way, state, most = engine.way(params), engine.state, engine.num_draft
    costs = Costs()
    state.active_B.zero_()  # steps of idle rows cost the same and change nothing
    for num_nodes in _lengths(most) * REPEATS:
        tree = DraftTree(torch.zeros(engine.cache.batch, num_nodes, dtype=torch.int64, device=state.root_B.device))
        seconds = _timed(lambda tree=tree: way.round(tree).verify(tree).counted_BX.tolist())
        costs.step[1 + num_nodes] = min(seconds, costs.step.get(1 + num_nodes, seconds))
    drafter = engine.drafter
    model = getattr(drafter, "model_drafter", None) if drafter and drafter.on_host else drafter
    if model is not None:
        seconds = min(_timed(lambda: model.draft(state.root_B, 2).tokens.tolist()) for _ in range(REPEATS))
        costs.draft = seconds / 2
    return costs


def _timed(function) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _lengths(most: int) -> list[int]:
    """0, 1, 2, 4 ... and the longest: between them costs are nearly linear."""
    doubling = [2**i for i in range(most.bit_length()) if 2**i < most]
    return [0, *doubling, most]
