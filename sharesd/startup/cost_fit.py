"""Tables of costs: fitted to timings at start, predicted for more rows, and kept for later starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from itertools import accumulate
from statistics import median
from typing import Any

from sharesd.speculation.cost_model import Costs, DraftCost
from sharesd.speculation.draft_tree import DraftKind
from sharesd_files import JsonCache

STEP = ""
Timed = str | DraftKind
"""What is timed: steps (`STEP`), or drafts of a kind."""


def fit_costs(
    ratios: Mapping[tuple[Timed, int, bool], list[float]],
    bases: Mapping[bool, list[float]],
    near: float,
    far: float | None,
    single_pass: Collection[str] = (),
) -> Costs:
    """Fit lines through times at two contexts, not falling with width.

    `ratios`: times over those of plain steps, by what was timed, width or depth, and True if far. `bases`:
    seconds of plain steps. `near`, `far`: live slots of the contexts; None if far was not measured. `single_pass`:
    drafters of which a draft takes one step.
    """
    plain = {is_far: min(times) for is_far, times in bases.items() if times}

    def line(timed: Timed, width: int) -> tuple[float, float]:
        at_near, at_far = (
            plain[is_far] * (median(ratios[timed, width, is_far]) if (timed, width) != (STEP, 1) else 1.0)
            for is_far in (False, far is not None)
        )
        slot = max(0.0, at_far - at_near) / (far - near) if far is not None else 0.0
        slot = min(slot, 0.5 * at_near / max(near, 1.0))  # with noise a line may start below zero; no step is free
        return at_near - slot * near, slot

    costs = Costs()
    lines = {width: line(STEP, width) for width in {1, *(width for timed, width, _ in ratios if timed == STEP)}}
    for width in sorted(lines):
        # Noise only adds time: a step takes no longer than a wider one, nor than as many plain steps as it has tokens.
        (first, slot), wider = lines[1], [lines[other] for other in lines if other >= width]
        costs.step[width] = max(first, min(width * first, *(at for at, _ in wider)) if width > 1 else first)
        costs.step_slot[width] = max(slot, min(slot for _, slot in wider))
    for kind in {timed: 0 for timed, _, _ in ratios if isinstance(timed, DraftKind)}:
        depths = sorted({depth for timed, depth, _ in ratios if timed == kind})
        (first, _), (last, slot), num = line(kind, depths[0]), line(kind, depths[-1]), depths[-1]
        # Where several steps seem as fast as one, the timing was noisy: no step is free.
        each = min(first, (last - first) / (num - 1)) if last > first else last / num
        begin = first - each if len(depths) > 1 else 0.0
        costs.drafts[kind] = DraftCost(each, begin, slot / num, kind.drafter in single_pass)
    return costs


def of_more_rows(costs: Costs, rows: int, most: int, at_most: Costs) -> Costs:
    """Predict costs of `rows` rows from those of one row and of the largest number of rows, `most`.

    A step reads its weights once, so R rows of T tokens cost what one row of R T tokens costs. Some of `at_most` are
    timed: wide steps are bound by arithmetic, which narrow ones do not show.
    """
    by_tokens = costs.step | {most * width: seconds for width, seconds in at_most.step.items()}
    tokens = sorted(by_tokens)
    longest = accumulate((by_tokens[num] for num in tokens), max)
    known, part = replace(costs, step=dict(zip(tokens, longest, strict=True))), (rows - 1) / (most - 1)

    def draft(at_one: DraftCost, timed: DraftCost) -> DraftCost:
        step, begin = (
            few + part * (many - few) for few, many in ((at_one.step, timed.step), (at_one.begin, timed.begin))
        )
        return replace(at_one, step=step, begin=begin, slot=rows * at_one.slot)

    return replace(
        costs,
        step={width: known.of_step(rows * width) for width in costs.step},
        step_slot={width: rows * slot for width, slot in costs.step_slot.items()},
        drafts={kind: draft(cost, at_most.drafts.get(kind, cost)) for kind, cost in costs.drafts.items()},
        growth=lambda width: costs.growth(rows * width),
    )


def load_costs(kept: JsonCache) -> Costs | None:
    """Return costs of an earlier start; warn if the cache is unreadable."""
    return kept.load(_checked)


def _checked(found: dict[str, Any]) -> Costs:
    step, step_slot = ({int(width): float(s) for width, s in found[name].items()} for name in ("step", "step_slot"))
    drafts = {DraftKind(*kind): DraftCost(**cost) for kind, cost in found["drafts"]}
    rates = [seconds for cost in drafts.values() for seconds in (cost.step, cost.begin, cost.slot)]
    if min(step.values()) <= 0 or min([0.0, *rates, *step_slot.values()]) < 0:
        raise ValueError("times must be positive")
    if 1 not in step or step.keys() != step_slot.keys():
        raise ValueError("a width is missing")
    return Costs(step=step, step_slot=step_slot, drafts=drafts)


def save_costs(kept: JsonCache, measured: Costs) -> None:
    drafts = [(kind, asdict(cost)) for kind, cost in measured.drafts.items()]
    kept.keep({"step": measured.step, "step_slot": measured.step_slot, "drafts": drafts})
