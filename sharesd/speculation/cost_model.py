"""Costs of rounds: a table fitted to timings at start, kept between starts, and corrected by every round.

Times are lines over the context, one for each measured number of tokens. They are compared with each other, never over
time: a common factor (drift) follows the machine quickly, single entries change slowly.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from compile.kv_layout import SINKS
from sharesd.speculation.draft_tree import DraftShape
from sharesd_files import JsonCache

RATES = ("draft", "level", "draft_begin", "level_begin", "draft_slot", "level_slot", "read")
"""Fields of `Costs` that are single numbers."""
SETTLING, TRIED, KNOWN = 5, 6, 8
"""Rounds before corrections; corrections of a reliable and of a drift-moving entry."""
ANCHORED = 32
"""Rounds after a plain one in which a slow draft is distinguishable."""

OTHER_CONTEXT, OTHER_DRIFT, SURPRISE = 1.5, 1.1, 1.15
"""A plain step is timed again after such changes of context or drift, or such an error of the last one, as factors."""
SOME_SLOTS = 512


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

    def of_step(self, width: float, context: float = 0.0) -> float:
        """Return seconds of a step of `width` tokens per row."""
        if width in self.step:
            return self._entry(width, context)  # type: ignore[arg-type]
        entries = self.interpolation(width)
        if len(entries) == 2:
            (low, left), (high, right) = entries
            return left * self._entry(low, context) + right * self._entry(high, context)
        [(entry, _)] = entries
        last = self._entry(entry, context)
        if width <= entry or len(self.step) == 1:
            return last
        before = sorted(self.step)[-2]
        slope = max(0.0, last - self._entry(before, context)) / (entry - before)
        return last + slope * (width - entry)

    def of_draft(self, shape: DraftShape, context: float = 0.0) -> float:
        """Return seconds of a model's draft of this shape."""
        if shape.window:
            context = min(context, shape.window + SINKS)
        num = self.num_steps(shape)
        if shape.is_tree:
            return num * (self.level + self.level_slot * context) + self.level_begin * (num > 0)
        return num * (self.draft + self.draft_slot * context) + self.draft_begin * (num > 0)

    def num_steps(self, shape: DraftShape) -> int:
        """Return the steps or levels of a model's draft of this shape."""
        return min(shape.depth, 1) if self.single_pass else shape.depth

    def interpolation(self, width: float) -> list[tuple[int, float]]:
        """Return the one or two entries around a width, with shares."""
        known = sorted(self.step)
        assert known, "no step has been measured"
        at = bisect_left(known, width)
        if at == 0 or at == len(known) or known[at] == width:
            return [(known[min(at, len(known) - 1)], 1.0)]
        low, high = known[at - 1], known[at]
        share = (width - low) / (high - low)
        return [(low, 1 - share), (high, share)]

    def scale_step(self, entry: int, factor: float) -> None:
        self.step[entry] *= factor
        if entry in self.step_slot:
            self.step_slot[entry] *= factor

    def scale_draft(self, tree: bool, factor: float) -> None:
        """Multiply the seconds of draft steps, or of levels if `tree`."""
        for name in ("level", "level_begin", "level_slot") if tree else ("draft", "draft_begin", "draft_slot"):
            setattr(self, name, factor * getattr(self, name))

    def _entry(self, entry: int, context: float) -> float:
        return self.step[entry] + self.step_slot.get(entry, 0.0) * context


_Plain = tuple[float, float, float]
"""Last timed plain step: context, drift, seconds over predicted seconds."""


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
        self._timed: Counter[object] = Counter()  # rounds, and how often entries of the table have been corrected
        self._since_plain = 0  # rounds
        self._plain_at: _Plain | None = None
        self._used: Counter[int] = Counter()  # since then: how often entries were used, steps by width, drafts by kind
        self._place: tuple[int, int] | None = None
        self._at_start = costs  # for this number of rows
        self._others: dict[tuple[int, int], tuple[Costs, float, Counter[object], _Plain | None]] = {}

    def at(self, context: float, threads: int, rows: int = 1) -> None:
        """Set the circumstances of the coming round: slots, threads, rows."""
        self.context = context
        rows = next((num for num in sorted(self.measured) if num >= rows), 0)
        place = threads, rows
        if place == self._place:
            return
        self._at_start = self.measured.get(rows, self._at_start)
        if self._place is not None:
            self._others[self._place] = (self.table, self.drift, self._timed, self._plain_at)
        if place in self._others:
            self.table, self.drift, self._timed, self._plain_at = self._others[place]
        elif rows:
            self.table, self._timed = copy.deepcopy(self.measured[rows]), Counter({"rounds": self._timed["rounds"]})
            self._plain_at = None
        elif self._place is not None:
            self.table, self._timed, self._plain_at = copy.deepcopy(self.table), Counter(), None
        self._place = place
        self._used.clear()

    @property
    def is_measured(self) -> bool:
        return bool(self.table.step)

    @property
    def is_settled(self) -> bool:
        """True if the drift has been learned."""
        return self._timed["rounds"] >= SETTLING

    @property
    def is_doubtful(self) -> bool:
        """True if a plain step must be timed again."""
        if self._plain_at is None:
            return True
        context, drift, ratio = self._plain_at
        moved = _factor_between(self.context + SOME_SLOTS, context + SOME_SLOTS)
        return (
            moved > OTHER_CONTEXT
            or _factor_between(self.drift, drift) > OTHER_DRIFT
            or _factor_between(ratio, 1.0) > SURPRISE
        )

    def step(self, width: float) -> float:
        """Return seconds of a step, without the drift."""
        return self.table.of_step(width, self.context)

    def draft(self, shape: DraftShape) -> float:
        """Return seconds of a model's draft, without the drift."""
        return self.table.of_draft(shape, self.context)

    def plain_steps(self, shape: DraftShape, width: int) -> float:
        """Return a round's plain steps by start costs, which stalls cannot change."""
        costs, context = self._at_start if self._at_start.step else self.table, self.context
        return (costs.of_draft(shape, context) + costs.of_step(width, context)) / costs.of_step(1, context)

    def is_tried(self, shape: DraftShape) -> bool:
        """Return True if drafts of this kind have been measured in rounds."""
        return self._timed["level" if shape.is_tree else "draft"] >= TRIED

    def record(self, shape: DraftShape, width: int, draft_s: float, step_s: float) -> None:
        """Correct costs by a round: seconds of drafting, and of the rest."""
        costs, timed = self.table, self._timed
        if width > max(costs.step, default=0):
            costs.step[width] = step_s / self.drift
        if shape.nodes and not self.draft(shape):
            setattr(costs, "level" if shape.is_tree else "draft", draft_s / costs.num_steps(shape) / self.drift)
        entries, step, draft = costs.interpolation(width), self.step(width), self.draft(shape)
        measured = step_s + (draft_s if shape.nodes else 0.0)
        settling = not self.is_settled  # entries would learn what the common factor has not yet
        self._since_plain = 0 if width == 1 else self._since_plain + 1
        if settling or width == 1 or all(timed[entry] >= KNOWN for entry, _ in entries):
            ratio = _clip(measured / ((draft + step) * self.drift))
            min_trust = 0.4 if width == 1 and self._used else 0.2
            factor = 1 + self._trust("rounds", min_trust) * (ratio - 1)
            self.drift *= factor
            if width == 1:
                self._keep_pace(1 / factor)
                self._plain_at = self.context, self.drift, ratio
        if width > 1:
            self._used.update(entry for entry, _ in entries if entry > 1)
            self._used.update([shape.is_tree] if shape.nodes else [])
        if settling or self._since_plain > ANCHORED:
            return
        error = _clip(step_s / (step * self.drift)) - 1
        for entry, share in entries:
            costs.scale_step(entry, 1 + share * self._trust(entry, 0.05) * error)
        if shape.nodes:
            error = _clip(draft_s / (draft * self.drift)) - 1
            costs.scale_draft(shape.is_tree, 1 + self._trust("level" if shape.is_tree else "draft", 0.05) * error)

    def _keep_pace(self, factor: float) -> None:
        """Scale corrected entries by a drift change; predicted times stay."""
        for entry, times in self._used.items():
            if times < 2:
                continue
            if isinstance(entry, bool):
                self.table.scale_draft(entry, factor)
            else:
                self.table.scale_step(entry, factor)
        self._used.clear()

    def _trust(self, entry: object, min_trust: float) -> float:
        """Return a round's weight in an entry: first a running mean."""
        self._timed[entry] += 1
        return max(min_trust, 1 / (1 + self._timed[entry]))


def _clip(ratio: float) -> float:
    """Limit a ratio: a fast round shows more than a slow one."""
    return min(1.5, max(0.1, ratio))


def _factor_between(a: float, b: float) -> float:
    return max(a / b, b / a)


def fit_costs(
    ratios: Mapping[tuple[str, int, bool], list[float]],
    bases: Mapping[bool, list[float]],
    near: float,
    far: float | None,
    single_pass: bool,
) -> Costs:
    """Fit lines through times at two contexts, not falling with width.

    `ratios`: times over those of plain steps, by kind, width or depth, and True if far. `bases`: seconds of plain
    steps. `near`, `far`: live slots of the contexts; None if far was not measured.
    """
    plain = {is_far: min(times) for is_far, times in bases.items() if times}

    def line(kind: str, width: int) -> tuple[float, float]:
        at_near, at_far = (
            plain[is_far] * (median(ratios[kind, width, is_far]) if (kind, width) != ("step", 1) else 1.0)
            for is_far in (False, far is not None)
        )
        slot = max(0.0, at_far - at_near) / (far - near) if far is not None else 0.0
        slot = min(slot, 0.5 * at_near / max(near, 1.0))  # with noise a line may start below zero; no step is free
        return at_near - slot * near, slot

    costs = Costs(single_pass=single_pass)
    for width in sorted({1, *(width for kind, width, _ in ratios if kind == "step")}):
        at, slot = line("step", width)
        costs.step[width] = max([at, *costs.step.values()])
        costs.step_slot[width] = max([slot, *costs.step_slot.values()])
    for kind in ("draft", "level"):
        depths = sorted({depth for name, depth, _ in ratios if name == kind})
        if depths:
            (first, _), (last, slot), num = line(kind, depths[0]), line(kind, depths[-1]), depths[-1]
            # Where several steps seem as fast as one, the timing was noisy: no step is free.
            each = min(first, (last - first) / (num - 1)) if last > first else last / num
            setattr(costs, kind, each)
            setattr(costs, f"{kind}_begin", first - each if len(depths) > 1 else 0.0)
            setattr(costs, f"{kind}_slot", slot / num)
    if ("read", 0, False) in ratios:
        costs.read = plain[False] * median(ratios["read", 0, False])
    return costs


def of_more_rows(costs: Costs, factor: float) -> Costs:
    """Predict costs for `factor` times the number of rows.

    A step reads its weights once, so R rows of T tokens cost what one row of R T tokens costs.
    """
    more = costs.of_step(factor) / costs.of_step(1)
    return replace(
        costs,
        step={width: costs.of_step(factor * width) for width in costs.step},
        step_slot={width: factor * slot for width, slot in costs.step_slot.items()},
        draft_slot=factor * costs.draft_slot,
        level_slot=factor * costs.level_slot,
        **{name: more * getattr(costs, name) for name in ("draft", "level", "draft_begin", "level_begin")},
    )


def load_costs(kept: JsonCache) -> Costs | None:
    """Return costs of an earlier start; warn if the cache is unreadable."""
    return kept.load(_checked)


def _checked(found: dict[str, Any]) -> Costs:
    step, step_slot = ({int(width): float(s) for width, s in found[name].items()} for name in ("step", "step_slot"))
    rates = {name: float(found[name]) for name in RATES}
    if min(step.values()) <= 0 or min(*rates.values(), *step_slot.values()) < 0:
        raise ValueError("times must be positive")
    if 1 not in step or step.keys() != step_slot.keys():
        raise ValueError("a width is missing")
    return Costs(step=step, step_slot=step_slot, single_pass=found["single_pass"], **rates)


def save_costs(kept: JsonCache, measured: Costs) -> None:
    kept.keep(asdict(measured))
