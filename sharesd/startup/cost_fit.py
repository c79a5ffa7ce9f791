"""Tables of costs: fitted to timings at start, predicted for more rows, and kept for later starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import accumulate
from statistics import median
from typing import Any

from sharesd.speculation.cost_model import Costs
from sharesd_files import JsonCache

RATES = ("draft", "level", "draft_begin", "level_begin", "draft_slot", "level_slot", "read")
"""Fields of `Costs` that are single numbers."""


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
    lines = {width: line("step", width) for width in {1, *(width for kind, width, _ in ratios if kind == "step")}}
    for width in sorted(lines):
        # Noise only adds time: a step takes no longer than a wider one, nor than as many plain steps as it has tokens.
        (first, slot), wider = lines[1], [lines[other] for other in lines if other >= width]
        costs.step[width] = max(first, min(width * first, *(at for at, _ in wider)) if width > 1 else first)
        costs.step_slot[width] = max(slot, min(slot for _, slot in wider))
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


def of_more_rows(costs: Costs, rows: int, most: int, at_most: Costs) -> Costs:
    """Predict costs of `rows` rows from those of one row and of the largest number of rows, `most`.

    A step reads its weights once, so R rows of T tokens cost what one row of R T tokens costs. Some of `at_most` are
    timed: wide steps are bound by arithmetic, which narrow ones do not show.
    """
    by_tokens = costs.step | {most * width: seconds for width, seconds in at_most.step.items()}
    tokens = sorted(by_tokens)
    longest = accumulate((by_tokens[num] for num in tokens), max)
    known, part = replace(costs, step=dict(zip(tokens, longest, strict=True))), (rows - 1) / (most - 1)
    drafts = {name: getattr(costs, name) for name in ("draft", "level", "draft_begin", "level_begin")}
    return replace(
        costs,
        step={width: known.of_step(rows * width) for width in costs.step},
        step_slot={width: rows * slot for width, slot in costs.step_slot.items()},
        draft_slot=rows * costs.draft_slot,
        level_slot=rows * costs.level_slot,
        growth=lambda width: costs.growth(rows * width),
        **{name: at_one + part * (getattr(at_most, name) - at_one) for name, at_one in drafts.items()},
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
    costs = Costs(step=step, step_slot=step_slot, single_pass=found["single_pass"])
    return replace(costs, **rates)  # type: ignore[arg-type]


def save_costs(kept: JsonCache, measured: Costs) -> None:
    kept.keep({name: value for name, value in asdict(measured).items() if name != "growth"})
