"""Warming up an engine: every form of a round runs until it is compiled, then rounds are timed for the policy."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from sharesd.config import SamplingParams
from sharesd.drafters.base import Drafter
from sharesd.engine import Engine
from sharesd.policy import Costs
from sharesd.tables.base import Guess
from sharesd.tree import PLAIN, DraftTree, Shape, chain, pack

log = logging.getLogger(__name__)

REPEATS, SECONDS = (2, 6), 0.6
"""Each round is timed at least and at most so often, and no more once this has passed; the quickest counts."""
STARTS = 4
"""Starts at which costs are measured: one of them may fall into a bad moment of the machine."""


def warm_up(engine: Engine, params: SamplingParams, kept: Path | None = None) -> None:
    """Compile what this way of sampling needs; where the policy chooses lengths, give it costs.

    `kept` is the file of costs measured before under the same conditions. Those of the first few starts are joined, the
    quickest of each; later starts measure nothing.
    """
    policy = engine.way(params).policy
    short = replace(params, ignore_eos=True, stop=(), stop_token_ids=())
    shapes = _shapes(engine) if policy.chooses else engine.drafter.shapes[-1:] if engine.drafter else (PLAIN,)
    prompt = [i % engine.target.vocab_size for i in range(min(8, engine.max_context // 2))]
    before = policy.pinned
    for shape in shapes:
        policy.pinned = shape
        engine.complete([prompt] * engine.cache.batch, replace(short, max_new_tokens=3 * (1 + shape.depth)))
    policy.pinned = before
    if engine.drafter is not None and engine.drafter.on_host:
        _verify_tree(engine, params)
    if policy.chooses or (engine.drafter is not None and engine.drafter.on_host):
        costs, starts = (_read(kept) if kept else None) or (None, 0)
        if costs is None or starts < STARTS:
            fresh = measure_costs(engine, params)
            costs = fresh if costs is None else quickest([costs, fresh])
            if kept:
                _write(kept, costs, starts + 1)
        policy.use(costs)
    engine.forget()


@torch.inference_mode()
def _verify_tree(engine: Engine, params: SamplingParams) -> None:
    """Verify a tree, where the target takes such: no table may have guessed one so far."""
    if not engine.target.takes_trees or params.acceptance != "match" or engine.num_draft < 2:
        return
    engine.state.active_B.zero_()
    siblings = Guess(list(range(engine.num_draft)), [-1] * engine.num_draft, [0.0] * engine.num_draft)
    tree = pack([siblings] * engine.cache.batch, engine.num_draft, engine.state.root_B.device, "")
    engine.way(params).round(tree).verify(tree)


@torch.inference_mode()
def measure_costs(engine: Engine, params: SamplingParams) -> Costs:
    """Seconds of steps and draft steps, behind whatever text the engine decoded last. Leaves that text alone."""
    way, state = engine.way(params), engine.state
    state.active_B.zero_()  # steps of idle rows cost the same and change nothing
    drafter = engine.drafter
    model = getattr(drafter, "model_drafter", None) if drafter and drafter.on_host else drafter
    steps: dict[int, list[float]] = {}
    drafts: list[float] = []
    levels: list[float] = []
    started = time.perf_counter()
    for repeat in range(REPEATS[1]):
        if repeat >= REPEATS[0] and time.perf_counter() - started > SECONDS:
            break
        for num_nodes in _lengths(engine.num_draft):
            tree = DraftTree(torch.zeros(engine.cache.batch, num_nodes, dtype=torch.int64, device=state.root_B.device))

            def step(tree: DraftTree = tree) -> object:
                return way.round(tree).verify(tree).counted_BX.tolist()

            # In the order of real rounds: what a cache of the processor holds decides what comes next.
            if num_nodes == 0:
                step()
            elif model is not None:
                drafts.append(_seconds_per_step(model, engine, chain(num_nodes)))
            steps.setdefault(1 + num_nodes, []).append(_timed(step))
        if model is not None and model.shapes[-1].is_tree:
            levels.append(_seconds_per_step(model, engine, model.shapes[-1]))
    step_s = {width: min(times) for width, times in steps.items()}
    return quickest([Costs(step_s, min(drafts, default=0.0), min(levels, default=0.0))])


def quickest(measured: Sequence[Costs]) -> Costs:
    """The least of each cost, over measurements of the same widths; a step takes no longer than a wider one did."""
    step = {
        width: min(seconds for costs in measured for wider, seconds in costs.step.items() if wider >= width)
        for width in measured[0].step
    }
    return Costs(step, min(costs.draft for costs in measured), min(costs.level for costs in measured))


def _seconds_per_step(drafter: Drafter, engine: Engine, shape: Shape) -> float:
    return _timed(lambda: drafter.draft(engine.state.root_B, shape).tokens.tolist()) / shape.depth


def _shapes(engine: Engine) -> list[Shape]:
    """No draft, and those whose rounds have compiled forms of their own."""
    drafter = engine.drafter
    assert drafter is not None
    if engine.capture:
        return [PLAIN, *drafter.shapes]
    return [PLAIN, chain(engine.num_draft), *(shape for shape in drafter.shapes[-1:] if shape.is_tree)]


def _read(file: Path) -> tuple[Costs, int] | None:
    """Costs, and at how many starts they were measured."""
    try:
        found = json.loads(file.read_text())
        step = {int(width): float(seconds) for width, seconds in found["step"].items()}
        costs = Costs(step, float(found["draft"]), float(found["level"]))
        if not step or min(*step.values(), 1.0) <= 0 or min(costs.draft, costs.level) < 0:
            raise ValueError("times must be positive")
        return costs, int(found["starts"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is measured again, it cannot be read (%s: %s)", file, type(error).__name__, error)
        return None


def _write(file: Path, costs: Costs, starts: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps({**asdict(costs), "starts": starts}))
    partial.replace(file)


def _timed(function) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _lengths(most: int) -> list[int]:
    """0, 1, 2, 4 ... and the longest: between them costs are nearly linear."""
    doubling = [2**i for i in range(most.bit_length()) if 2**i < most]
    return [0, *doubling, most]
