"""Warming up an engine: every form of a round runs until it is compiled, then rounds are timed for the policy."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from sharesd.config import SamplingParams
from sharesd.engine import Engine
from sharesd.policy import Costs
from sharesd.tree import DraftTree

log = logging.getLogger(__name__)

REPEATS = 3
"""Times that each round is timed; the median counts."""


def warm_up(engine: Engine, params: SamplingParams, kept: Path | None = None) -> None:
    """Compile what this way of sampling needs; where the policy chooses lengths, give it costs.

    `kept` is the file of costs measured before under the same conditions; without it, or if it is damaged, they are
    measured now, and kept.
    """
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
        costs = _read(kept) if kept else None
        if costs is None:
            costs = measure_costs(engine, params)
            if kept:
                _write(kept, costs)
        policy.use(costs)
    engine.forget()


@torch.inference_mode()
def measure_costs(engine: Engine, params: SamplingParams) -> Costs:
    """Seconds of steps and draft steps, behind whatever text the engine decoded last. Leaves that text alone."""
    way, state = engine.way(params), engine.state
    state.active_B.zero_()  # steps of idle rows cost the same and change nothing
    drafter = engine.drafter
    model = getattr(drafter, "model_drafter", None) if drafter and drafter.on_host else drafter
    steps: dict[int, list[float]] = {}
    drafts: list[float] = []
    for _ in range(REPEATS):
        for num_nodes in _lengths(engine.num_draft):
            tree = DraftTree(torch.zeros(engine.cache.batch, num_nodes, dtype=torch.int64, device=state.root_B.device))

            def step(tree: DraftTree = tree) -> object:
                return way.round(tree).verify(tree).counted_BX.tolist()

            # In the order of real rounds: what a cache of the processor holds decides what comes next.
            if num_nodes == 0:
                step()
            elif model is not None:
                seconds = _timed(lambda num=num_nodes: model.draft(state.root_B, num).tokens.tolist())
                drafts.append(seconds / num_nodes)
            steps.setdefault(1 + num_nodes, []).append(_timed(step))
    return Costs({width: median(times) for width, times in steps.items()}, median(drafts) if drafts else 0.0)


def _read(file: Path) -> Costs | None:
    try:
        found = json.loads(file.read_text())
        step = {int(width): float(seconds) for width, seconds in found["step"].items()}
        costs = Costs(step, float(found["draft"]))
        if not step or min(*step.values(), 1.0) <= 0 or costs.draft < 0:
            raise ValueError("times must be positive")
        return costs
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is measured again, it cannot be read (%s: %s)", file, type(error).__name__, error)
        return None


def _write(file: Path, costs: Costs) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps({"step": costs.step, "draft": costs.draft}))
    partial.replace(file)


def _timed(function) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _lengths(most: int) -> list[int]:
    """0, 1, 2, 4 ... and the longest: between them costs are nearly linear."""
    doubling = [2**i for i in range(most.bit_length()) if 2**i < most]
    return [0, *doubling, most]
