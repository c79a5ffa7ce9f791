"""Costs of rounds: a table fitted to timings at start, kept between starts, and corrected by every round.

Times are lines over the context, one for each measured number of tokens. They are compared with each other, never over
time: a common factor (drift) follows the machine, and entries of the table follow what rounds take beyond it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import exp, log

from compile.kv_layout import SINKS
from sharesd.speculation.draft_tree import DraftKind, DraftShape

START_DOUBT = 0.3
"""Relative error of a start's costs, fresh or kept, before rounds have repeated them."""
MACHINE_WALK, ENTRY_WALK = 0.02, 0.004
"""Relative change, in a round, of the machine's speed and of an entry in comparison with it."""
NOISE, MIN_NOISE = 0.05, 0.02
"""Relative noise of a time: at first, and at least."""
BEYOND_DOUBT = 2
"""Standard errors of a repeated error at which what was believed is doubted again."""
PLAIN_GAP, FRESH_DRIFT, SUSPICIOUS = 128, 8, 0.5
"""Drafts after which two plain steps are timed; drafts for which the drift that they show is sure; change of the drift
since then, as a logarithm, at which they are timed at once."""
UNTIMED = 0.5
"""Seconds of a draft step that was not timed, in plain steps; rounds correct this as what was."""
CONTEXT_GRID = 16
"""Slots by which the context grows before costs are computed again."""

Entry = int | DraftKind
"""What has an entry: steps of a number of tokens, and drafts of a kind."""
Parts = Sequence[tuple[Entry, float]]
"""Entries that a time is computed from, with shares."""


def proportional(rows: float) -> float:
    return rows


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of a model's drafts of one kind."""

    step: float
    """Of a draft step, or of a level of a tree."""
    begin: float = 0.0
    """That the first one takes longer, to load small weights."""
    slot: float = 0.0
    """That each live slot adds to each."""
    single_pass: bool = False
    """A draft takes one step or level whatever its depth."""

    def num_steps(self, depth: float) -> float:
        """Return the steps or levels of a draft of this depth."""
        return min(depth, 1) if self.single_pass else depth

    def of_step(self, window: int, context: float) -> float:
        """Return seconds of a step that is not the first, with this number of live slots."""
        return self.step + self.slot * (min(context, window + SINKS) if window else context)

    def of_draft(self, depth: float, window: int = 0, context: float = 0.0) -> float:
        """Return seconds of a draft of this depth."""
        return self.num_steps(depth) * self.of_step(window, context) + self.begin * (depth > 0)

    def scaled(self, factor: float) -> DraftCost:
        return replace(self, step=factor * self.step, begin=factor * self.begin, slot=factor * self.slot)


@dataclass(slots=True)
class Costs:
    """Seconds of rounds per machine, model, number of rows and sampling kind."""

    step: dict[int, float] = field(default_factory=dict)
    """Seconds of a target step by tokens per row, sampling included."""
    step_slot: dict[int, float] = field(default_factory=dict)
    """Seconds that each live slot, mean of rows, adds to a step."""
    drafts: dict[DraftKind, DraftCost] = field(default_factory=dict)
    """Costs of models' drafts; none if tables draft."""
    growth: Callable[[float], float] = field(default=proportional, compare=False)
    """How the time of a step grows with its tokens between measured ones, see `Decoder.growth`."""

    def of_step(self, width: float, context: float = 0.0) -> float:
        """Return seconds of a step of `width` tokens per row."""
        return sum(
            share * (self.step[entry] + self.step_slot.get(entry, 0.0) * context)
            for entry, share in self.interpolation(width)
        )

    def interpolation(self, width: float) -> list[tuple[int, float]]:
        """Return the entries that the time of a step of this width is computed from, with shares."""
        if width in self.step:
            return [(int(width), 1.0)]
        known, growth = sorted(self.step), self.growth
        if len(known) == 1:
            return [(known[0], 1.0)]
        at = min(max(1, bisect_left(known, width)), len(known) - 1)  # wider ones grow as the last two do
        low, high = known[at - 1 : at + 1]
        share = (growth(width) - growth(low)) / (growth(high) - growth(low))
        return [(low, 1 - share), (high, share)]

    @property
    def chain(self) -> DraftCost:
        """Cost of chains where one model drafts."""
        return next((cost for kind, cost in self.drafts.items() if not kind.is_tree), DraftCost(0.0))

    def draft(self, kind: DraftKind) -> DraftCost:
        """Return the cost of drafts of a kind."""
        return self.drafts.get(kind) or DraftCost(UNTIMED * self.step[1])

    def of_draft(self, shape: DraftShape, context: float = 0.0, depth: float | None = None) -> float:
        """Return seconds of a model's draft of this shape, or of its kind with this depth."""
        return self.draft(shape.kind).of_draft(shape.depth if depth is None else depth, shape.window, context)

    def scale(self, entry: Entry, factor: float) -> None:
        """Multiply the seconds of an entry. A step still takes no longer than a wider one."""
        if isinstance(entry, DraftKind):
            self.drafts[entry] = self.draft(entry).scaled(factor)
            return
        at_entry = max(factor * self.step[entry], self.step.get(1, 0.0))
        self.step_slot[entry] = factor * self.step_slot.get(entry, 0.0)
        for width, seconds in self.step.items():
            if width == entry or (1 < width < entry and seconds > at_entry) or (width > entry and seconds < at_entry):
                self.step[width] = at_entry


def guessed_costs() -> Costs:
    """Return costs to begin with where nothing was timed."""
    return Costs({1: 0.01, 9: 0.015})


class _Place:
    """Costs of one number of threads and rows, and what is known of their errors."""

    def __init__(self, table: Costs, at_start: Costs, drift: float = 1.0) -> None:
        self.table, self.at_start, self.drift = table, at_start, drift
        self.noise = NOISE**2
        self.errors = dict[Entry, float]()  # last relative errors of predictions, by what was timed
        # Squared relative errors. The plain step has none: it is the measure.
        self.drift_variance = START_DOUBT**2
        self.variances = defaultdict[Entry, float](lambda: START_DOUBT**2, {1: 0.0})
        self.parts: dict[int, list[tuple[int, float]]] = {}  # interpolations by width
        self._plain_run, self._num_drafts = 0, FRESH_DRIFT + 1  # plain steps in a row; drafts since two of them
        self._plain_drift, self.suspicion = self.drift, 1 - 1 / PLAIN_GAP

    def parts_of(self, width: int) -> list[tuple[int, float]]:
        """Return the entries that a step of this width is computed from, with shares."""
        parts = self.parts.get(width)
        if parts is None:
            parts = self.parts[width] = self.table.interpolation(width)
        return parts

    def suspect(self, is_plain: bool) -> None:
        """Suspect the drift more after each draft, and not at all after two plain steps in a row."""
        self._plain_run = (self._plain_run + 1) * is_plain
        if self._plain_run > 1:  # one alone may be a stall
            self._plain_drift, self.suspicion, self._num_drafts = self.drift, 0.0, 0
        else:
            self.suspicion += 1 / PLAIN_GAP + (log(self.drift / self._plain_drift) / SUSPICIOUS) ** 2
            self._num_drafts += not is_plain

    def correct(self, timed: Entry, parts: Parts, seconds: float, predicted: float) -> None:
        """Correct drift and entries by the error of a prediction, each by its part of the variance.

        An error counts as far as the next one of what was `timed` repeats it: a stall does not last. Without
        covariances, drift takes errors of entries where all rounds draft. So plain steps are timed now and then, these
        find the drift, and if drafts soon after them contradict it beyond doubt, their entries are wrong.
        """
        error, variances = log(max(seconds, 1e-9) / (predicted * self.drift)), self.variances
        last, self.errors[timed] = self.errors.get(timed), error
        if last is None:
            return
        self.noise += 0.03 * (max(MIN_NOISE**2, min((error - last) ** 2 / 2, 9 * self.noise)) - self.noise)
        repeated = (error if abs(error) < abs(last) else last) if error * last > 0 else 0.0
        variance = self.noise + self.drift_variance
        for key, share in parts:
            variance += share * share * variances[key]
        if not repeated and error**2 > 9 * variance:
            return  # a stall, or the first time of another speed
        self.errors[timed] = error - repeated * (1 - self.noise / variance)  # what is left of it
        gain = self.drift_variance / variance
        self.drift_variance *= 1 - gain
        self.drift *= exp(gain * repeated)
        for key, share in parts:
            gain = share * variances[key] / variance
            variances[key] *= 1 - share * gain
            if repeated and gain:
                self.table.scale(key, exp(gain * repeated))
        if repeated**2 <= BEYOND_DOUBT**2 * variance:
            return
        if not parts:
            self.drift_variance, self._plain_run = START_DOUBT**2, 0
        elif self._num_drafts <= FRESH_DRIFT:
            variances.update((key, START_DOUBT**2) for key, _ in parts if key != 1)


class LiveCosts:
    """Costs for the present context, threads, rows and speed of the machine."""

    def __init__(self, costs: Costs, measured: Mapping[int, Costs] | None = None) -> None:
        """`measured`: costs by number of rows."""
        self.measured = measured or {}
        self.context = 0.0
        """Live slots."""
        self.point: tuple[float, int, int] | None = None
        """Circumstances of the coming round: slots, threads, rows."""
        self._now = _Place(deepcopy(costs), costs)
        self._places: dict[tuple[int, int], _Place] = {}
        self._forget()

    def _forget(self) -> None:
        self._steps: dict[float, float] = {}  # by width

    def at(self, context: float, threads: int, rows: int = 1) -> None:
        """Set the `point`."""
        point = context - context % CONTEXT_GRID, threads, rows
        if point == self.point:
            return
        self._forget()
        self.point, self.context = point, point[0]
        rows = next((num for num in sorted(self.measured) if num >= rows), 0)
        if (threads, rows) not in self._places:
            start = self.measured.get(rows)
            found = _Place(deepcopy(start or self.table), start or self._now.at_start, self.drift)
            self._places[threads, rows] = found
        self._now = self._places[threads, rows]

    @property
    def table(self) -> Costs:
        """Costs for the present numbers of threads and rows."""
        return self._now.table

    @property
    def drift(self) -> float:
        """Factor by which the machine is slower than the table."""
        return self._now.drift

    @property
    def plain_is_due(self) -> bool:
        """True if two plain steps should be timed: only they tell a slow machine from expensive drafts."""
        return self._now.suspicion >= 1

    def step(self, width: float) -> float:
        """Return seconds of a step, without the drift."""
        found = self._steps.get(width)
        if found is not None:
            return found
        low = int(width)
        if width > low:
            return self.step(low) + (width - low) * (self.step(low + 1) - self.step(low))
        step, slot, context = self.table.step, self.table.step_slot, self.context
        found = sum(share * (step[key] + slot.get(key, 0.0) * context) for key, share in self._now.parts_of(low))
        self._steps[low] = found
        return found

    def draft(self, shape: DraftShape, depth: float | None = None) -> float:
        """See `Costs.of_draft`; without the drift."""
        return self.table.of_draft(shape, self.context, depth)

    def draft_step(self, shape: DraftShape) -> float:
        """Return seconds of a draft step, or level, that is not the first, without the drift."""
        return self.table.draft(shape.kind).of_step(shape.window, self.context)

    def plain_steps(self, shape: DraftShape, width: int) -> float:
        """Return a round's plain steps by start costs, which stalls cannot change."""
        costs, context = self._now.at_start, self.context
        return (costs.of_draft(shape, context) + costs.of_step(width, context)) / costs.of_step(1, context)

    def record(self, shape: DraftShape, width: int, draft_s: float, step_s: float) -> None:
        """Correct costs by a round: seconds of drafting, and of the rest."""
        now = self._now
        now.drift_variance += MACHINE_WALK**2
        for entry in now.variances:
            now.variances[entry] += ENTRY_WALK**2 * (entry != 1)
        if width == 1:
            now.correct(1, (), step_s, self.step(1))
            now.suspect(is_plain=True)
            return
        if shape.nodes and draft_s:
            now.correct(shape.kind, ((shape.kind, 1.0),), draft_s, self.draft(shape))
        now.correct(2, now.parts_of(width), step_s, self.step(width))
        now.suspect(is_plain=False)
        self._forget()
