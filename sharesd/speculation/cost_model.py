"""Costs of rounds: a table fitted to timings at start, kept between starts, and corrected by every round.

Times are lines over the context, one for each measured number of tokens. They are compared with each other, never over
time: a common factor (drift) follows the machine, and entries of the table follow what rounds take beyond it.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import Any

import numpy as np

from compile.kv_layout import SINKS
from sharesd.speculation.draft_tree import DraftShape

START_DOUBT = 0.3
"""Relative error of a start's costs, fresh or kept, before rounds have repeated them."""
MACHINE_WALK, ENTRY_WALK = 0.02, 0.004
"""Relative change, in a round, of the machine's speed and of an entry in comparison with it."""
NOISE, MIN_NOISE = 0.05, 0.02
"""Relative noise of a time: at first, and at least."""


def proportional(rows: float) -> float:
    return rows


@dataclass(slots=True)
class Costs:
    """Seconds of rounds per machine, model, number of rows and sampling kind."""

    step: dict[int, float] = field(default_factory=dict)
    """Seconds of a target step by tokens per row, sampling included."""
    draft: float = 0.0
    """Seconds of a draft step; 0 if tables draft."""
    level: float = 0.0
    """Seconds of a level of a draft tree."""
    step_slot: dict[int, float] = field(default_factory=dict)
    """Seconds that each live slot, mean of rows, adds to a step."""
    draft_slot: float = 0.0
    """Seconds that each live slot adds to a draft step."""
    level_slot: float = 0.0
    """Seconds that each live slot adds to a level."""
    read: float = 0.0
    """Seconds of reading one token that a drafter missed; 0 without work."""
    single_pass: bool = False
    """Drafts take one step or level whatever their depth."""
    draft_begin: float = 0.0
    """Seconds that the first draft step takes longer, to load small weights."""
    level_begin: float = 0.0
    """Seconds that the first level takes longer."""
    growth: Callable[[float], float] = field(default=proportional, compare=False)
    """How the time of a step grows with its tokens between measured ones, see `Decoder.growth`."""

    def of_step(self, width: float, context: float = 0.0) -> float:
        """Return seconds of a step of `width` tokens per row."""
        if (measured := self.step.get(width)) is not None:  # type: ignore[call-overload]
            return measured + self.step_slot.get(width, 0.0) * context  # type: ignore[call-overload]
        shares = self.interpolation(width)
        known = sum(share * (self.step[entry] + self.step_slot.get(entry, 0.0) * context) for entry, share in shares)
        last = max(self.step)
        if width <= last or len(self.step) == 1:
            return known
        before = sorted(self.step)[-2]
        rise = max(0.0, known - self.of_step(before, context)) / (self.growth(last) - self.growth(before))
        return known + rise * (self.growth(width) - self.growth(last))

    def of_draft(self, shape: DraftShape, context: float = 0.0) -> float:
        """Return seconds of a model's draft of this shape."""
        if shape.window:
            context = min(context, shape.window + SINKS)
        num = self.num_steps(shape)
        if shape.is_tree:
            return num * (self.level + self.level_slot * context) + self.level_begin * (num > 0)
        return num * (self.draft + self.draft_slot * context) + self.draft_begin * (num > 0)

    def num_steps(self, shape: DraftShape) -> float:
        """Return the steps or levels of a model's draft of this shape."""
        return min(shape.depth, 1) if self.single_pass else shape.depth

    def interpolation(self, width: float) -> list[tuple[int, float]]:
        """Return the one or two entries around a width, with shares."""
        if width in self.step:
            return [(int(width), 1.0)]
        known = sorted(self.step)
        assert known, "no step has been measured"
        at = bisect_left(known, width)
        if at == 0 or at == len(known):
            return [(known[min(at, len(known) - 1)], 1.0)]
        low, high = known[at - 1], known[at]
        share = (self.growth(width) - self.growth(low)) / (self.growth(high) - self.growth(low))
        return [(low, 1 - share), (high, share)]

    def scale_step(self, entry: int, factor: float) -> None:
        self.step[entry] *= factor
        if entry in self.step_slot:
            self.step_slot[entry] *= factor

    def scale_draft(self, tree: bool, factor: float) -> None:
        """Multiply the seconds of draft steps, or of levels if `tree`."""
        for name in ("level", "level_begin", "level_slot") if tree else ("draft", "draft_begin", "draft_slot"):
            setattr(self, name, factor * getattr(self, name))


class _Corrections:
    """Kalman filter of the logarithms of the machine's drift and of the table's entries.

    The plain step is the measure of the machine: its entry has no error of its own. Covariances tell what a time can
    be blamed on: without plain steps a slow machine and dear drafts look alike, and remain in doubt.
    """

    def __init__(self, table: Costs) -> None:
        keys: list[str | int] = ["drift", "draft", "level"]
        widths = [width for width in sorted(table.step) if width > 1]
        keys += widths
        self.place: dict[str | int, int] = dict(zip(keys, range(len(keys)), strict=True))
        self.covariance = START_DOUBT**2 * np.eye(len(self.place))
        near = np.exp(-np.abs(np.subtract.outer(np.log(widths), np.log(widths))))  # neighbouring widths err alike
        self.covariance[3:, 3:] = START_DOUBT**2 * near
        self.noise = NOISE**2
        self._walk = np.full(len(self.place), ENTRY_WALK**2)
        self._walk[0] = MACHINE_WALK**2
        self._variances = np.einsum("ii->i", self.covariance)  # a view of the diagonal
        self._last: dict[str, float] = {}  # last errors, by what was timed

    def _spread(self, shares: Mapping[str | int, float]) -> tuple[Any, float]:
        """Return the covariances of a weighted sum with all entries, and its variance."""
        known = [(self.place[key], share) for key, share in shares.items() if key in self.place]
        spread: Any = sum(share * self.covariance[at] for at, share in known)
        return spread, float(sum(share * spread[at] for at, share in known))

    def variance(self, shares: Mapping[str | int, float]) -> float:
        return self._spread(shares)[1]

    def walk(self) -> None:
        self._variances += self._walk

    def correct(self, key: str, shares: Mapping[str | int, float], error: float) -> list[tuple[str | int, float]]:
        """Return what to add to the logarithms of drift and entries, for the error of a predicted time.

        `key`: what was timed. An error counts as far as the next one of its key repeats it: a stall does not last.
        """
        last, self._last[key] = self._last.get(key, error), error
        self.noise += 0.03 * (max(MIN_NOISE**2, min((error - last) ** 2 / 2, 9 * self.noise)) - self.noise)
        spread, doubt = self._spread({"drift": 1.0, **shares})
        self.covariance -= np.multiply.outer(spread / (doubt + self.noise), spread)
        if error * last <= 0:
            return []
        error = min(error, last, key=abs)
        self._last[key] -= doubt / (doubt + self.noise) * error  # what is left of it
        changes = (error / (doubt + self.noise) * spread).tolist()
        return list(zip(self.place, changes, strict=True))


class LiveCosts:
    """Costs for the present context, threads, rows and speed of the machine."""

    def __init__(self, costs: Costs, measured: Mapping[int, Costs] | None = None) -> None:
        """`measured`: costs by number of rows."""
        self.table = copy.deepcopy(costs)
        """Costs for the present numbers of threads and rows."""
        self.measured = measured or {}
        self.context = 0.0
        self.drift = 1.0
        """Factor by which the machine is slower than the table."""
        self._corrections = _Corrections(self.table)
        self._place: tuple[int, int] | None = None
        self._at_start = costs  # for this number of rows
        self._others: dict[tuple[int, int], tuple[Costs, float, _Corrections]] = {}

    def at(self, context: float, threads: int, rows: int = 1) -> None:
        """Set the circumstances of the coming round: slots, threads, rows."""
        self.context = context
        rows = next((num for num in sorted(self.measured) if num >= rows), 0)
        place = threads, rows
        if place == self._place:
            return
        self._at_start = self.measured.get(rows, self._at_start)
        if self._place is not None:
            self._others[self._place] = (self.table, self.drift, self._corrections)
        if place in self._others:
            self.table, self.drift, self._corrections = self._others[place]
        elif rows or self._place is not None:
            self.table = copy.deepcopy(self.measured[rows] if rows else self.table)
            self._corrections = _Corrections(self.table)
        self._place = place

    @property
    def is_measured(self) -> bool:
        return bool(self.table.step)

    def step(self, width: float) -> float:
        """Return seconds of a step, without the drift."""
        return self.table.of_step(width, self.context)

    def draft(self, shape: DraftShape) -> float:
        """Return seconds of a model's draft, without the drift."""
        return self.table.of_draft(shape, self.context)

    def doubt(self, shape: DraftShape, width: float) -> float:
        """Return the standard error of a round's seconds, in comparison with plain steps."""
        step, draft = self.step(width), self.draft(shape)
        shares: dict[str | int, float] = {entry: step * share for entry, share in self.table.interpolation(width)}
        shares["level" if shape.is_tree else "draft"] = draft
        return sqrt(max(0.0, self._corrections.variance(shares)))

    def plain_steps(self, shape: DraftShape, width: int) -> float:
        """Return a round's plain steps by start costs, which stalls cannot change."""
        costs, context = self._at_start if self._at_start.step else self.table, self.context
        return (costs.of_draft(shape, context) + costs.of_step(width, context)) / costs.of_step(1, context)

    def record(self, shape: DraftShape, width: int, draft_s: float, step_s: float) -> None:
        """Correct costs by a round: seconds of drafting, and of the rest."""
        costs = self.table
        if not costs.step or (width > 1 and max(costs.step) == 1):  # nothing was measured at start
            costs.step[width] = step_s / self.drift
            self._corrections = _Corrections(costs)
        self._corrections.walk()
        if shape.nodes and draft_s:
            kind = "level" if shape.is_tree else "draft"
            if not self.draft(shape):
                setattr(costs, kind, draft_s / costs.num_steps(shape) / self.drift)
            self._correct(kind, {kind: 1.0}, draft_s, self.draft(shape))
        shares: dict[str | int, float] = {entry: share for entry, share in costs.interpolation(width) if entry > 1}
        self._correct("step" if width > 1 else "plain", shares, step_s, self.step(width))

    def _correct(self, timed: str, shares: Mapping[str | int, float], seconds: float, predicted: float) -> None:
        error = log(max(seconds, 1e-9) / (predicted * self.drift))
        for key, change in self._corrections.correct(timed, shares, error):
            if key == "drift":
                self.drift *= exp(change)
            elif isinstance(key, int):
                self.table.scale_step(key, exp(change))
            else:
                self.table.scale_draft(key == "level", exp(change))
