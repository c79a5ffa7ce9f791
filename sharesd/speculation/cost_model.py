"""What rounds cost: a table measured at start, corrected by every round.

A step takes longer the more rows it has, and the longer the texts are that its rows attend to; so does a draft step.
Both are lines over the context, one for each number of rows that was measured.

Times are compared with each other, never over time: what slows the machine down slows all entries of the table alike,
so a common factor (drift) follows it quickly and single entries slowly.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from compile.attention import SINKS
from sharesd.speculation.draft_tree import Shape

SETTLING, TRIED, KNOWN = 5, 6, 8
"""Rounds before single costs are corrected; corrections of a cost that tell something, and before the machine's pace is
told from it."""
ANCHORED = 32
"""Rounds after a plain one in which costs are corrected: all are compared with what plain steps take. Later a slower
machine cannot be told from a dearer draft, and each stall would leave the draft a little cheaper than it is."""

OTHER_CONTEXT, OTHER_MOOD, SURPRISE = 1.5, 1.1, 1.15
"""Factors by which context (and some slots) and drift must have moved for plain steps to be timed again, and by which
the last one must have been off."""
SOME_SLOTS = 512


@dataclass(slots=True)
class Costs:
    """Seconds that rounds take, for one machine, model, number of rows and way of sampling."""

    step: dict[int, float] = field(default_factory=dict)
    """A step of the target over this many tokens per row, choosing tokens included; linear between entries."""
    draft: float = 0.0
    """One draft step; 0 where drafts come from tables."""
    level: float = 0.0
    """One level of a draft tree."""
    step_slot: dict[int, float] = field(default_factory=dict)
    """What a step takes longer for each live slot (mean over rows), for the same entries as `step`."""
    draft_slot: float = 0.0
    """The same for a draft step."""
    level_slot: float = 0.0
    """The same for a level."""
    read: float = 0.0
    """Reading a token that a drafter has missed, so that it can draft again; 0 where that is no work."""
    at_once: bool = False
    """Drafts take one step, or level, whatever their depth."""
    draft_begin: float = 0.0
    """What the first draft step takes longer than others: a small drafter's weights come from memory only then."""
    level_begin: float = 0.0
    """The same of levels."""

    def of_step(self, width: float, context: float = 0.0) -> float:
        """Seconds of a step of this many tokens per row behind so many live slots.

        Asserts that at least one width has been measured.
        """
        if width in self.step:
            return self._entry(width, context)  # type: ignore[arg-type]
        entries = self.shares(width)
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

    def of_draft(self, shape: Shape, context: float = 0.0) -> float:
        """Seconds of a model's draft of this shape."""
        if shape.recent:
            context = min(context, shape.recent + SINKS)
        num = self.num_steps(shape)
        if shape.is_tree:
            return num * (self.level + self.level_slot * context) + self.level_begin * (num > 0)
        return num * (self.draft + self.draft_slot * context) + self.draft_begin * (num > 0)

    def num_steps(self, shape: Shape) -> int:
        """Steps, or levels, that a model's draft of this shape takes."""
        return min(shape.depth, 1) if self.at_once else shape.depth

    def shares(self, width: float) -> list[tuple[int, float]]:
        """The entries, one or two, between which a step of this many rows lies, and the share of each in its cost."""
        known = sorted(self.step)
        assert known, "no step has been measured"
        at = bisect_left(known, width)
        if at == 0 or at == len(known) or known[at] == width:
            return [(known[min(at, len(known) - 1)], 1.0)]
        low, high = known[at - 1], known[at]
        share = (width - low) / (high - low)
        return [(low, 1 - share), (high, share)]

    def scale_step(self, entry: int, factor: float) -> None:
        """Correct what steps of a measured width take."""
        self.step[entry] *= factor
        if entry in self.step_slot:
            self.step_slot[entry] *= factor

    def scale_draft(self, tree: bool, factor: float) -> None:
        """Correct what draft steps, or levels of trees, take."""
        for name in ("level", "level_begin", "level_slot") if tree else ("draft", "draft_begin", "draft_slot"):
            setattr(self, name, factor * getattr(self, name))

    def _entry(self, entry: int, context: float) -> float:
        return self.step[entry] + self.step_slot.get(entry, 0.0) * context


_Plain = tuple[float, float, float]
"""When a plain step was timed last: context, drift, what it took over what was expected."""


class LiveCosts:
    """Costs as they are now: behind so much text, with so many threads, on a machine in this mood."""

    def __init__(self, costs: Costs, measured: Mapping[int, Costs] | None = None) -> None:
        """`measured`: the same for other numbers of rows, where that was measured."""
        self.table = copy.deepcopy(costs)
        """For the numbers of threads and of rows that are in use."""
        self.measured = measured or {}
        self.context = 0.0
        """Live slots, on average over the rows."""
        self.drift = 1.0
        """How much slower the machine is than the table says."""
        self._timed: Counter[object] = Counter()  # rounds, and how often entries of the table have been corrected
        self._since_plain = 0  # rounds
        self._plain_at: _Plain | None = None
        self._used: Counter[int] = Counter()  # since then: how often entries took part, steps by width, drafts by kind
        self._place: tuple[int, int] | None = None
        self._at_start = costs  # for this number of rows
        self._others: dict[tuple[int, int], tuple[Costs, float, Counter[object], _Plain | None]] = {}

    def at(self, context: float, threads: int, rows: int = 1) -> None:
        """The coming round's circumstances. Numbers of threads, and of rows, have tables of their own, which begin as
        copies, or as what was measured.
        """
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
    def known(self) -> bool:
        """Whether anything has been measured."""
        return bool(self.table.step)

    @property
    def settled(self) -> bool:
        """Whether `drift` has been learnt."""
        return self._timed["rounds"] >= SETTLING

    @property
    def doubtful(self) -> bool:
        """Whether plain steps were last timed in another context or mood, or took what nobody expected."""
        if self._plain_at is None:
            return True
        context, drift, ratio = self._plain_at
        moved = _apart(self.context + SOME_SLOTS, context + SOME_SLOTS)
        return moved > OTHER_CONTEXT or _apart(self.drift, drift) > OTHER_MOOD or _apart(ratio, 1.0) > SURPRISE

    def step(self, width: float) -> float:
        """Seconds of a step, but for the drift."""
        return self.table.of_step(width, self.context)

    def draft(self, shape: Shape) -> float:
        """Seconds of a model's draft, but for the drift."""
        return self.table.of_draft(shape, self.context)

    def plain_steps(self, shape: Shape, width: int) -> float:
        """How many times as long as a plain step a round takes, a model's draft of this shape and a step of this width.

        As measured at start: what a stall of the machine has made look long would never be looked at again.
        """
        costs, context = self._at_start if self._at_start.step else self.table, self.context
        return (costs.of_draft(shape, context) + costs.of_step(width, context)) / costs.of_step(1, context)

    def tried(self, shape: Shape) -> bool:
        """Whether rounds have told what drafts of this kind take."""
        return self._timed["level" if shape.is_tree else "draft"] >= TRIED

    def learn(self, shape: Shape, width: int, draft_s: float, step_s: float) -> None:
        """A round took so long: drafting (0 nodes: no model did), and the step of this width with all the rest."""
        costs, timed = self.table, self._timed
        if width > max(costs.step, default=0):
            costs.step[width] = step_s / self.drift
        if shape.nodes and not self.draft(shape):
            setattr(costs, "level" if shape.is_tree else "draft", draft_s / costs.num_steps(shape) / self.drift)
        entries, step, draft = costs.shares(width), self.step(width), self.draft(shape)
        measured = step_s + (draft_s if shape.nodes else 0.0)
        settling = not self.settled  # entries would learn what the common factor has not yet
        self._since_plain = 0 if width == 1 else self._since_plain + 1
        if settling or width == 1 or all(timed[entry] >= KNOWN for entry, _ in entries):
            ratio = _clip(measured / ((draft + step) * self.drift))
            least = 0.4 if width == 1 and self._used else 0.2
            factor = 1 + self._trust("rounds", least) * (ratio - 1)
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
        """The drift has followed a plain step; what other rounds took of late is known, and stays."""
        for entry, times in self._used.items():
            if times < 2:
                continue
            if isinstance(entry, bool):
                self.table.scale_draft(entry, factor)
            else:
                self.table.scale_step(entry, factor)
        self._used.clear()

    def _trust(self, entry: object, least: float) -> float:
        """How far a round corrects an entry: by a running mean at first, which the table opens with one vote."""
        self._timed[entry] += 1
        return max(least, 1 / (1 + self._timed[entry]))


def _clip(ratio: float) -> float:
    """One slow round says little; a quick one shows what is possible."""
    return min(1.5, max(0.1, ratio))


def _apart(a: float, b: float) -> float:
    return max(a / b, b / a)
