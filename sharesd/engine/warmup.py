"""Warming up an engine: every form of a round runs until it is compiled, then rounds are timed for the policy."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from compile.cuda_graphs import WARM_CALLS
from sharesd.config import SamplingParams
from sharesd.drafters.base import Drafter, Drafting
from sharesd.drafters.classic.drafter import ClassicDrafter
from sharesd.engine.decode_round import Round
from sharesd.engine.engine import Engine
from sharesd.speculation.cost_model import Costs
from sharesd.speculation.draft_proposal import Guess
from sharesd.speculation.draft_tree import PLAIN, DraftTree, Shape, chain, pack

log = logging.getLogger(__name__)

SWEEPS, SECONDS = (3, 12), 0.5
"""All rounds are timed at least and at most so often, and no more once this has passed and the times agree."""
PATIENCE = 3
"""Times that disagree are taken for so many times longer; those that still do are not kept."""
AGREE = 1.25
"""The middle half of the repeats of a round, relative to a plain step, may differ by this factor."""
STARTS = 3
"""Starts at which costs are measured: one of them may fall into a bad moment of the machine."""
BRIEFLY = 1
"""Sweeps, at least, over more rows than the fewest, which take long: several starts are joined, and rounds correct
costs as they go."""
SLOWER = 1.3
"""Costs from a moment when plain steps took so many times as long as they do now are not used."""
SHARE_OF_LONGEST = 4
"""Where weights come through a slow link a pass may take a second, and hardly depends on its number of rows. So no more
is timed than the longest draft and one so many times shorter, at one context, and a start makes do with a dozen passes.
"""
MISSED = 64
"""Tokens that a drafter reads together while that is timed."""
FAR = 2048
"""Live slots, at most, at which rounds are timed besides those right behind the text."""
RATES = ("draft", "level", "draft_begin", "level_begin", "draft_slot", "level_slot", "read")
"""What of the costs is a single number."""


def warm_up(engine: Engine, params: SamplingParams, kept: Path | None = None) -> None:
    """Compile what this way of sampling needs; where the policy chooses lengths, give it costs.

    `kept` is the file of costs measured before under the same conditions. Those of the first few starts are joined;
    later starts measure nothing but a plain step, which tells whether the machine was in a bad way then.
    """
    policy = engine.way(params).policy
    short = replace(params, ignore_eos=True, stop=(), stop_token_ids=(), grammar=None)
    shapes = _shapes(engine, params)
    prompt = [i % engine.target.vocab_size for i in range(min(8, engine.max_context // 2))]
    before = policy.pinned
    for shape in [PLAIN] if engine.offloaded else shapes:
        policy.pinned = shape
        num_tokens = 2 if engine.offloaded else 3 * (1 + shape.depth)
        engine.generate([prompt] * engine.cache.batch, replace(short, max_new_tokens=num_tokens))
    policy.pinned = before
    if engine.graphs is not None:
        _capture(engine, params)
    if engine.drafter is not None and engine.drafter.on_host:
        _verify_tree(engine, params)
    if policy.chooses or (engine.drafter is not None and engine.drafter.on_host):
        fewest, *more = engine.sizes
        sweeps = {fewest: BRIEFLY if engine.offloaded else SWEEPS[0], **dict.fromkeys(more, BRIEFLY)}
        measured = {rows: _costs(engine, params, rows, kept, sweeps[rows]) for rows in sweeps}
        policy.use(measured[engine.cache.batch], measured)
    engine.forget()


def warm_up_each_kind(engine: Engine) -> None:
    """Run rounds of all kinds that requests may make up together: whoever asks for something first shall not wait until
    that is captured or compiled, and neither shall others. (Not with grammars, which are rare, and not of
    other acceptance than `match`, for which all requests must be alike.) What rounds take was measured with one kind.
    """
    if engine.graphs is None:
        _choose_each_way(engine)
        return
    for temperature, bias, logprobs in product((0.0, 1.0), ({}, {0: 0.0}), (False, True)):
        params = SamplingParams(max_new_tokens=1, temperature=temperature, logit_bias=bias, logprobs=logprobs)
        engine.generate([[0]], params)  # a first token, which no round makes
        _capture(engine, params)
    engine.forget()


def _choose_each_way(engine: Engine) -> None:
    """Choose tokens in all ways, where nothing is captured: kernels that do so are built or compiled when first used.
    Not where weights travel, whose passes take long.
    """
    if engine.offloaded:
        return
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            max_new_tokens=3, temperature=temperature, top_k=4, top_p=0.9, min_p=0.01, logprobs=True, top_logprobs=1
        )
        engine.generate([[0]], params)
    engine.forget()


def _costs(engine: Engine, params: SamplingParams, rows: int, kept: Path | None, sweeps: int) -> Costs:
    """Of rounds over so many rows: what earlier starts measured, and this one, unless there were enough."""
    if kept and rows < engine.cache.batch:
        kept = kept.with_name(f"{kept.stem}-{rows}{kept.suffix}")
    earlier = _read(kept) if kept else []
    if earlier:
        now = min(_timed(_step(engine, params, 0, rows)) for _ in range(SWEEPS[0]))
        earlier = [costs for costs in earlier if costs.step[1] < SLOWER * now]
    if len(earlier) < STARTS:
        fresh, agree = measure_costs(engine, params, rows, sweeps)
        if kept and agree:
            _write(kept, [*earlier, fresh])
        earlier.append(fresh)
    return typical(earlier)


@torch.inference_mode()
def _capture(engine: Engine, params: SamplingParams) -> None:
    """Run every form of a round until it is replayed, with idle rows, which change nothing. Where weights travel, only
    drafts are captured, and nothing else is run. Of several numbers of rows the largest comes first: the memory that
    its graphs use does for the others.
    """
    engine.rest()
    model, way = _model_drafter(engine), engine.way(params)
    shapes = way.policy.shapes if model is not None else ()
    kinds = {(shape.is_tree, shape.recent): shape for shape in shapes}

    def verify(round_: Round, tree: DraftTree) -> None:
        if not engine.offloaded:
            round_.fetched(round_.verify(tree))

    for rows, _ in product(reversed(engine.sizes), range(1 + WARM_CALLS)):
        round_ = way.round(0, rows)
        verify(round_, DraftTree(torch.zeros(rows, 0, dtype=torch.int64)))
        for shape in kinds.values():  # the largest of each kind
            assert model is not None
            verify(round_, model.draft(round_.drafting, shape))
        if engine.num_draft:
            verify(round_, DraftTree(torch.zeros(rows, 1, dtype=torch.int64)))
    if isinstance(model, ClassicDrafter):
        _capture_reading(model)


def _capture_reading(model: ClassicDrafter) -> None:
    """Read what a model missed until that is replayed, behind each row's text, which stays."""
    cache = model.cache
    held, lengths_B = list(cache.held), cache.lengths.clone()
    for row, _ in product(range(cache.batch), range(1 + WARM_CALLS)):
        cache.held[row] = list(held[row])
        model.catch_up({row: [*held[row], 0, 0]}, idle=True)
    cache.held[:] = held
    cache.lengths.copy_(lengths_B)


@torch.inference_mode()
def _verify_tree(engine: Engine, params: SamplingParams) -> None:
    """Verify a tree, where the target takes such: no table may have guessed one so far."""
    if not engine.target.takes_trees or params.acceptance != "match" or engine.num_draft < 2:
        return
    engine.rest()
    siblings = Guess(list(range(engine.num_draft)), [-1] * engine.num_draft, [0.0] * engine.num_draft)
    tree = pack([siblings] * engine.cache.batch, engine.num_draft, "")
    engine.way(params).round().verify(tree)


@torch.inference_mode()
def measure_costs(
    engine: Engine, params: SamplingParams, rows: int | None = None, sweeps: int = SWEEPS[0]
) -> tuple[Costs, bool]:
    """Seconds of steps and draft steps of the first `rows` rows (default: all), behind whatever text the engine
    decoded last, from `sweeps` repeats at least; and whether they can be trusted.

    Leaves that text alone, and writes behind it. Every round is compared with the plain steps around it, at two
    contexts: what slows the machine down meanwhile slows both.
    """
    rows = rows or engine.cache.batch
    model = _model_drafter(engine)
    for cache in engine.caches:
        cache.unpark()
    lengths = [cache.lengths for cache in engine.caches]
    before = [lengths_B.clone() for lengths_B in lengths]
    near = float(engine.cache.lengths.double().mean())
    room = min(engine.max_context, engine.cache.slots) - 2 * (1 + engine.num_draft) - 1
    far = min(FAR, room) if min(FAR, room) > 2 * near + 64 and not engine.offloaded else None
    timers = _timers(engine, params, rows)
    plain = _step(engine, params, 0, rows)
    ratios: dict[tuple[str, int, bool], list[float]] = {}
    bases: dict[bool, list[float]] = {False: [], True: []}
    started = time.perf_counter()
    agree = False
    for sweep in range(SWEEPS[1] * PATIENCE):
        passed = time.perf_counter() - started
        agree = all(_spread(times) < AGREE for times in ratios.values())
        if sweep >= sweeps and (passed > PATIENCE * SECONDS or (agree and (passed > SECONDS or sweep >= SWEEPS[1]))):
            break
        for is_far in (False, *([True] if far is not None else [])):
            if is_far and far is not None:
                for lengths_B in lengths:
                    lengths_B.fill_(far)
            plain()
            base = _timed(plain)
            for key, seconds in timers.items():
                took = seconds()
                after = _timed(plain)
                ratios.setdefault((*key, is_far), []).append(2 * took / (base + after))
                bases[is_far].append(after)
                base = after
            for lengths_B, before_B in zip(lengths, before, strict=True):
                lengths_B.copy_(before_B)
    for cache in engine.caches:
        cache.park(0, cache.batch)
    return _fit(ratios, bases, near, far, model is not None and model.at_once), agree


def _timers(engine: Engine, params: SamplingParams, rows: int) -> dict[tuple[str, int], Callable[[], float]]:
    """What is compared with a plain step: kind and width, and a function that does it and tells the seconds it took."""
    model, drafting = _model_drafter(engine), engine.way(params).round(0, rows).drafting
    timers: dict[tuple[str, int], Callable[[], float]] = {}
    most = engine.num_draft
    few = sorted({max(1, most // SHARE_OF_LONGEST), most} - {0})
    for num_nodes in few if engine.offloaded else _lengths(most)[1:]:
        timers["step", 1 + num_nodes] = partial(_timed, _step(engine, params, num_nodes, rows))
    if model is not None:
        deepest, largest = chain(max(1, engine.num_draft // 2)), engine.way(params).policy.shapes[-1]
        kinds = {"draft": deepest, **({"level": largest} if largest.is_tree else {})}
        for kind, shape in kinds.items():
            depths = (1,) if model.at_once else (shape.depth,) if engine.offloaded else (1, shape.depth)
            for depth in dict.fromkeys(depths):
                timers[kind, depth] = partial(_draft_seconds, model, drafting, shape, depth)
        if model.rehearse(drafting, MISSED):
            timers["read", 0] = lambda: _timed(partial(model.rehearse, drafting, MISSED)) / MISSED
    return timers


def _model_drafter(engine: Engine) -> Drafter | None:
    drafter = engine.drafter
    return getattr(drafter, "model_drafter", None) if drafter and drafter.on_host else drafter


def _step(engine: Engine, params: SamplingParams, num_nodes: int, rows: int) -> Callable[[], object]:
    """A round of idle rows with so many draft tokens, which takes as long as others and changes nothing."""
    engine.rest()
    round_ = engine.way(params).round(0, rows)
    tree = DraftTree(torch.zeros(rows, num_nodes, dtype=torch.int64))

    @torch.inference_mode()
    def step() -> object:
        return round_.verify(tree).counted_BX.tolist()

    return step


def _spread(times: list[float]) -> float:
    """How much the middle half of some times differs."""
    low, _, high = quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return high / low


def _fit(
    ratios: Mapping[tuple[str, int, bool], list[float]],
    bases: Mapping[bool, list[float]],
    near: float,
    far: float | None,
    at_once: bool,
) -> Costs:
    """Lines through what was measured at both contexts; a wider step takes no less time than a narrower one."""
    plain = {is_far: min(times) for is_far, times in bases.items() if times}

    def line(kind: str, width: int) -> tuple[float, float]:
        at_near, at_far = (
            plain[is_far] * (median(ratios[kind, width, is_far]) if (kind, width) != ("step", 1) else 1.0)
            for is_far in (False, far is not None)
        )
        slot = max(0.0, at_far - at_near) / (far - near) if far is not None else 0.0
        return at_near - slot * near, slot

    costs = Costs(at_once=at_once)
    for width in sorted({1, *(width for kind, width, _ in ratios if kind == "step")}):
        at, slot = line("step", width)
        costs.step[width] = max([at, *costs.step.values()])
        costs.step_slot[width] = max([slot, *costs.step_slot.values()])
    for kind in ("draft", "level"):
        depths = sorted({depth for name, depth, _ in ratios if name == kind})
        if depths:
            (first, _), (last, slot), num = line(kind, depths[0]), line(kind, depths[-1]), depths[-1]
            # More steps that took no longer than one were timed amid noise, and none is free.
            each = min(first, (last - first) / (num - 1)) if last > first else last / num
            setattr(costs, kind, each)
            setattr(costs, f"{kind}_begin", first - each if len(depths) > 1 else 0.0)
            setattr(costs, f"{kind}_slot", slot / num)
    if ("read", 0, False) in ratios:
        costs.read = plain[False] * median(ratios["read", 0, False])
    return costs


def typical(measured: Sequence[Costs]) -> Costs:
    """Of several measurements of the same rounds, the medians relative to a plain step, at the pace of the quickest."""
    plain = min(costs.step[1] for costs in measured)

    def middle(of: Callable[[Costs], float]) -> float:
        return plain * median(of(costs) / costs.step[1] for costs in measured)

    def middles(name: str) -> dict[int, float]:
        return {width: middle(lambda costs, width=width: getattr(costs, name)[width]) for width in measured[0].step}  # type: ignore[misc]

    rates = {name: middle(attrgetter(name)) for name in RATES}
    return Costs(step=middles("step"), step_slot=middles("step_slot"), at_once=measured[0].at_once, **rates)


def _draft_seconds(drafter: Drafter, drafting: Drafting, shape: Shape, depth: int) -> float:
    """Of a draft of this kind and so many levels. (With fewer nodes, which hardly matters.)"""
    nodes = min(shape.nodes, depth + 1) if shape.is_tree else depth
    return _timed(lambda: drafter.draft(drafting, shape._replace(depth=depth, nodes=nodes)).tokens.tolist())


def _shapes(engine: Engine, params: SamplingParams) -> list[Shape]:
    """Those whose rounds have compiled forms of their own; no draft among them, where that may be chosen."""
    if engine.drafter is None:
        return [PLAIN]
    policy = engine.way(params).policy
    if not policy.chooses:
        return [shape for shape in policy.shapes if shape[:2] == policy.shapes[-1][:2]]
    chains = [shape for shape in policy.shapes if not shape.is_tree]  # a tree may have more nodes than any has tokens
    longest = (max(chains, key=lambda shape: shape.depth), policy.shapes[-1])
    windows = {shape.recent for shape in policy.shapes}
    return [PLAIN, *dict.fromkeys(shape._replace(recent=recent) for recent in windows for shape in longest)]


def _read(file: Path) -> list[Costs]:
    """The costs of earlier starts."""
    try:
        return [_checked(found) for found in json.loads(file.read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is measured again, it cannot be read (%s)", file, repr(error))
        return []


def _checked(found: dict[str, Any]) -> Costs:
    step, step_slot = ({int(width): float(s) for width, s in found[name].items()} for name in ("step", "step_slot"))
    rates = {name: float(found[name]) for name in RATES}
    if min(step.values()) <= 0 or min(*rates.values(), *step_slot.values()) < 0:
        raise ValueError("times must be positive")
    if 1 not in step or step.keys() != step_slot.keys():
        raise ValueError("a width is missing")
    return Costs(step=step, step_slot=step_slot, at_once=found.get("at_once", False), **rates)


def _write(file: Path, measured: Sequence[Costs]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial_file = file.with_name(f".{file.name}.{os.getpid()}")
    partial_file.write_text(json.dumps([asdict(costs) for costs in measured]))
    partial_file.replace(file)


def _timed(function) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _lengths(most: int) -> list[int]:
    """0, 1, 2, 4 ... and the longest: between them costs are nearly linear."""
    doubling = [2**i for i in range(most.bit_length()) if 2**i < most]
    return [0, *doubling, most]
