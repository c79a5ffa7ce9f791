"""Times an engine's rounds, for the draft policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import quantiles

import torch

from compile.block_ranges import BlockRange
from compile.decoder_stack import NativeStack
from sharesd.drafters.base import DraftContext, Drafter, num_bytes
from sharesd.engine.engine import Engine
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.cost_model import Costs
from sharesd.speculation.draft_tree import DraftShape, DraftTree, chain
from sharesd.startup.cost_fit import STEP, Timed, fit_costs, load_costs, of_more_rows, save_costs
from sharesd_files import JsonCache

SWEEPS, SECONDS = (3, 12), 0.5
"""Fewest and most repeats, and the seconds after which no repeat starts if times agree."""
MAX_SECONDS, MAX_SWEEPS = 1.5, 36
"""Limits after which no repeat starts; disagreeing times are not kept."""
PLAIN_STEPS = 2
"""Plain steps that are timed to compare kept costs."""
AGREE = 1.25
"""Largest ratio of quartiles, relative to a plain step, of agreeing repeats."""
BRIEFLY = 1
SLOWER = 1.3
"""Ratio of a kept plain step's time to a new one from which kept costs are discarded."""
SHARE_OF_LONGEST = 4
"""Ratio of the longest to the shortest timed draft if offloaded."""
FAR = 2048
"""Largest number of live slots at which rounds are timed."""
SAMPLE_BYTES = 2**29
"""Bytes of weights of the blocks that are timed, more than CPU caches hold."""
MANY_ROWS_PART = 0.25
"""Part of the blocks that are timed with many rows: others' KV of rows that are never used takes no memory."""


class BlockSample:
    """First blocks of a decoder, which stand for all of them.

    Only the C++ kernel can run part of a decoder without a new compilation. Other models are timed whole.
    """

    def __init__(self, model: CausalModel | None, *, is_timed: bool = True, part: float = 1.0) -> None:
        """`is_timed`: use enough blocks for a timing, or all of them. `part`: largest part of the blocks to use."""
        self._model = model if isinstance(model, Decoder) and is_native(model) else None
        self._num_blocks, self._scale = 0, 1.0
        if self._model is None or self._model.split.crosses_devices:
            self._model = None
            return
        blocks = self._model.blocks
        self.num_all = len(blocks)
        self.model_bytes = len(blocks) * num_bytes(blocks[0])
        """Weights of all blocks."""
        self._num_blocks = max(1, min(-(-SAMPLE_BYTES // num_bytes(blocks[0])), int(part * len(blocks))))
        self._scale = len(blocks) / self._num_blocks
        if is_timed and self._scale < 2:
            self._model = None

    @property
    def is_whole(self) -> bool:
        """True if all blocks are timed."""
        return self._model is None

    def seconds(self, function: Callable[[], object]) -> float:
        """Return the seconds of a function that runs the model.

        Those of the timed blocks are scaled to all.
        """
        if self._model is None:
            return _timed(function)
        with self.blocks(0):
            rest = _timed(function)
        with self.blocks(self._num_blocks):
            return rest + self._scale * max(0.0, _timed(function) - rest)

    @contextmanager
    def blocks(self, num_blocks: int) -> Iterator[None]:
        """Run only the first `num_blocks` blocks inside the context."""
        model = self._model
        if model is None:
            yield
            return
        whole = model.ranges
        model.ranges = lambda: (BlockRange(0, num_blocks),)
        try:
            yield
        finally:
            model.ranges = whole


def is_native(model: CausalModel) -> bool:
    """Return True if the C++ kernel runs the model."""
    return isinstance(model, Decoder) and isinstance(model.run_stack, NativeStack)


@contextmanager
def first_blocks(engine: Engine, mode: str) -> Iterator[None]:
    """Run one block of each native model of a mode."""
    if engine.offloaded:
        yield
        return
    drafter = engine.modes[mode].drafter
    models = [engine.target, *(model for model, _ in (drafter.prompt_readers() if drafter else ()))]
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(BlockSample(model, is_timed=False).blocks(1))
        yield


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def profile_costs(engine: Engine, mode: str, params: SamplingParams, kept: JsonCache | None) -> dict[int, Costs]:
    """Return a mode's costs by number of rows, kept ones if there are any.

    With the C++ kernel those of several rows are predicted from few timings at the largest number.
    """
    fewest, *more = engine.batch_sizes
    sweeps = BRIEFLY if engine.offloaded else SWEEPS[0]
    costs = {fewest: _costs_of_rows(engine, mode, params, fewest, kept, sweeps)}
    timed = more[-1:] if is_native(engine.target) else more
    sweeps = sweeps if is_native(engine.target) else BRIEFLY
    costs |= {rows: _costs_of_rows(engine, mode, params, rows, kept, sweeps) for rows in timed}
    if isinstance(engine.target, Decoder):
        for each in costs.values():
            each.growth = engine.target.growth
    if is_native(engine.target) and more:
        most = more[-1]
        costs |= {rows: of_more_rows(costs[fewest], rows, most, costs[most]) for rows in more}
    return costs


def _costs_of_rows(
    engine: Engine, mode: str, params: SamplingParams, rows: int, kept: JsonCache | None, sweeps: int
) -> Costs:
    """Return kept costs, or time rounds if there are none.

    Plain steps show whether kept costs were measured while the machine was slower; rounds correct them later.
    """
    if kept and rows < engine.cache.batch:
        kept = kept.with_key(rows)
    completes = is_native(engine.target) and rows > engine.batch_sizes[0]
    earlier = load_costs(kept) if kept else None
    if earlier is not None:
        step, sample = _step(engine, mode, params, 0, rows), BlockSample(engine.target, part=MANY_ROWS_PART)
        now = min(sample.seconds(step) if completes else _timed(step) for _ in range(PLAIN_STEPS))
        if earlier.step[1] < SLOWER * now:
            return earlier
    fresh, agree = measure_costs(engine, mode, params, rows, sweeps, SECONDS, completes)
    if kept and agree:
        save_costs(kept, fresh)
    return fresh


@torch.inference_mode()
def measure_costs(
    engine: Engine,
    mode: str,
    params: SamplingParams,
    rows: int | None = None,
    sweeps: int = SWEEPS[0],
    seconds: float | None = None,
    completes: bool = False,
) -> tuple[Costs, bool]:
    """Time a mode's rounds, each between plain steps, at two contexts; return costs, and True if repeats agree.

    Of large models only some blocks are timed, see `BlockSample`. Repeats start until `seconds` have passed, or
    SECONDS. `completes`: time only what timings of one row do not show, see `of_more_rows`.
    """
    rows = rows or engine.cache.batch
    caches, num_draft = engine.modes[mode].caches, engine.modes[mode].num_draft
    for cache in caches:
        cache.unpark()
    lengths = [cache.lengths for cache in caches]
    before = [lengths_B.clone() for lengths_B in lengths]
    near = float(engine.cache.lengths.double().mean())
    room = min(engine.max_context, engine.cache.slots) - 2 * (1 + num_draft) - 1
    sample = BlockSample(engine.target, part=MANY_ROWS_PART if completes else 1.0)
    far = min(FAR, room) if min(FAR, room) > 2 * near + 64 and not (engine.offloaded or completes) else None
    contexts = (False, True) if far is not None and sample.is_whole else (False,)
    timers = _timers(engine, mode, params, rows, sample, completes)
    step = _step(engine, mode, params, 0, rows)
    plain = partial(sample.seconds, step)
    ratios: dict[tuple[Timed, int, bool], list[float]] = {}
    bases: dict[bool, list[float]] = {False: [], True: []}
    started, enough = time.perf_counter(), SECONDS if seconds is None else seconds
    agree = False
    for sweep in range(MAX_SWEEPS):
        passed = time.perf_counter() - started
        agree = all(_spread(times) < AGREE for times in ratios.values())
        if sweep and passed > MAX_SECONDS:
            agree &= sweep >= min(sweeps, 2)  # one agrees with nothing, unless only one was asked for
            break
        if sweep >= sweeps and agree and (passed > enough or sweep >= SWEEPS[1]):
            break
        for is_far in contexts:
            if is_far and far is not None:
                for lengths_B in lengths:
                    lengths_B.fill_(far)
            plain()
            base = plain()
            for key, timer in timers.items():
                took = timer()
                after = plain()
                ratios.setdefault((*key, is_far), []).append(2 * took / (base + after))
                bases[is_far].append(after)
                base = after
            for lengths_B, before_B in zip(lengths, before, strict=True):
                lengths_B.copy_(before_B)
    slot = 0.0
    is_whole = sample.is_whole or completes
    if not is_whole:
        bases[False] = [_timed(step)]
        if far is not None:
            slot = _slot_seconds(sample, _step(engine, mode, params, num_draft, rows), lengths, near, far)
    for lengths_B, before_B in zip(lengths, before, strict=True):
        lengths_B.copy_(before_B)
    for cache in caches:
        cache.park(0, cache.batch)
    models = models_of(engine, mode)
    costs = fit_costs(
        ratios, bases, near, far if is_whole else None, {model.name for model in models if model.single_pass}
    )
    return costs if is_whole else _with_slots(costs, engine, models, sample, slot), agree


def _slot_seconds(
    sample: BlockSample, step: Callable[[], object], lengths: list[torch.Tensor], near: float, far: int
) -> float:
    """Return a live slot's seconds in a step.

    One block is timed at two contexts.
    """
    took = []
    with sample.blocks(1):
        for length in (int(near), far):
            for lengths_B in lengths:
                lengths_B.fill_(length)
            step()
            took.append(min(_timed(step) for _ in range(2)))
    return sample.num_all * max(0.0, took[1] - took[0]) / (far - int(near))


def _with_slots(costs: Costs, engine: Engine, models: Sequence[Drafter], sample: BlockSample, widest: float) -> Costs:
    """Fill in seconds of live slots.

    Those of one token follow from the bytes of its KV, those of the widest step are given.
    """
    cache = engine.cache
    narrowest = costs.step[1] * cache.nbytes / (cache.slots * cache.batch) / sample.model_bytes
    ends = Costs({1: narrowest, max(costs.step): max(narrowest, widest)})
    slots = {width: ends.of_step(width) for width in costs.step}
    by_target = {model.name for model in models if model.step_model() is engine.target}
    drafts = {
        kind: replace(cost, slot=slots[1]) if kind.drafter in by_target else cost for kind, cost in costs.drafts.items()
    }
    return replace(costs, step_slot=slots, drafts=drafts)


def _timers(
    engine: Engine, mode: str, params: SamplingParams, rows: int, sample: BlockSample, completes: bool
) -> dict[tuple[Timed, int], Callable[[], float]]:
    """Return timers, in seconds, by what is timed and its width or depth.

    `completes`: only those of steps wider than one row's, and of short drafts.
    """
    variant, longest = engine.variant(params, mode), engine.modes[mode].num_draft
    context = variant.round(0, rows).context
    timers: dict[tuple[Timed, int], Callable[[], float]] = {}
    briefly = engine.offloaded or not sample.is_whole
    short = max(1, longest // SHARE_OF_LONGEST)
    few = {short, longest} if engine.offloaded else {1, min(3, longest)} if completes else {1, short, longest}
    for num_nodes in sorted(few) if (briefly or completes) and longest else _lengths(longest)[1:]:
        timers[STEP, 1 + num_nodes] = partial(sample.seconds, _step(engine, mode, params, num_nodes, rows))
    for model in models_of(engine, mode):
        sample = BlockSample(model.step_model(), part=MANY_ROWS_PART if completes else 1.0)
        shapes = [shape for shape in variant.policy.shapes if shape.drafter == model.name]
        deepest = chain(max(1, longest // 2))._replace(drafter=model.name)
        for shape in (deepest, shapes[-1]) if shapes[-1].is_tree else (deepest,):
            last = shape.depth if sample.is_whole and not completes else min(2, shape.depth)
            once = engine.offloaded or completes or (shape.is_tree and not sample.is_whole)
            depths = (1,) if model.single_pass else (last,) if once else (1, last)
            for depth in dict.fromkeys(depths):
                timers[shape.kind, depth] = partial(sample.seconds, partial(_draft, model, context, shape, depth))
    return timers


def models_of(engine: Engine, mode: str) -> Sequence[Drafter]:
    """Return a mode's model drafters; none of tables alone."""
    drafter = engine.modes[mode].drafter
    return drafter.models if drafter else ()


def _step(engine: Engine, mode: str, params: SamplingParams, num_nodes: int, rows: int) -> Callable[[], object]:
    """Return a round of idle rows, which changes nothing.

    Its draft tokens differ: equal ones would choose the same experts of a mixture, and a wide step would cost little.
    """
    engine.deactivate_rows()
    round_, num_tokens = engine.variant(params, mode).round(0, rows), rows * num_nodes
    spread = torch.arange(1, num_tokens + 1) * engine.target.vocab_size // (num_tokens + 1)
    tree = DraftTree(spread.view(rows, num_nodes))

    @torch.inference_mode()
    def step() -> object:
        return round_.run(tree).packed_result_BX.tolist()

    return step


def _draft(drafter: Drafter, context: DraftContext, shape: DraftShape, depth: int) -> object:
    nodes = min(shape.nodes, depth + 1) if shape.is_tree else depth
    return drafter.draft(context, shape._replace(depth=depth, nodes=nodes)).tokens.tolist()


def _spread(times: list[float]) -> float:
    low, _, high = quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return high / low


def _lengths(max_length: int) -> list[int]:
    """Return 0, 1, 2, 4 ... and `max_length`; costs are nearly linear."""
    powers_of_two = [2**i for i in range(max_length.bit_length()) if 2**i < max_length]
    return [0, *powers_of_two, max_length]
