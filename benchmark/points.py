"""Points of a sweep: figures, summary lines and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import TYPE_CHECKING, Any

from benchmark.questions.results import tables_at_start
from benchmark.report import Report
from sharesd.drafters import registry
from sharesd.engine.stats import Stats
from sharesd.reports.pictures import can_draw
from sharesd.reports.tables import Section, bullets, has_drifted, number, times

if TYPE_CHECKING:
    from benchmark.timed import Comparison

MIN_SPEEDUP = 0.98  # speedup below which a point counts as lost
MIN_OF_BEST = 0.99  # share of the best single drafter's speed that modes which mix drafters should have
Axis = tuple[str, tuple[str, ...]]  # name and values as typed
Turn = tuple[dict[str, Any], "Comparison"]  # questions and lengths of a group's prompts, and its figures


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Figures of a mode at a point of the axes."""

    values: dict[str, str]  # axis -> value
    mode: str
    speedup: float | None  # median of the runs' geometric means over turns; None if nothing was decoded
    interval: list[float] | None  # see `interval_of`
    slowest: float | None  # least of the turns' speedups
    first: float | None  # geometric mean of the first runs; in later ones the draft policy had measured this text
    tau: float  # tokens per round of a row
    alpha: float
    draft_ms: float | None  # milliseconds of a step of a draft model; None without one
    verify_ms: float | None  # milliseconds of a verify step
    drift: float | None  # speed of naive in the last run over that in the first; None for a single run
    naive_ms: float | None  # milliseconds of naive per decoded token, all rows together
    identical: bool  # true if all tokens are those of naive
    turns: list[dict[str, Any]]


def point_of(values: dict[str, str], mode: str, turns: Sequence[Turn]) -> Point:
    comparisons, total = [comparison for _, comparison in turns], Stats()
    for each in comparisons:
        total.merge(each.stats)
    known = [each.speedup for each in comparisons if each.speedup is not None]
    runs = [geometric_mean(run) for run in zip(*(each.ratios for each in comparisons if each.ratios), strict=False)]
    timed = [each for each in comparisons if len(each.naive_s) > 1]
    naive_s = [seconds for each in comparisons for seconds in each.naive_s]
    return Point(
        values=values,
        mode=mode,
        speedup=median(runs) if runs else None,
        interval=interval_of([each.ratios for each in comparisons]),
        slowest=min(known, default=None),
        first=runs[0] if runs else None,
        tau=total.tau,
        alpha=total.alpha,
        draft_ms=1e3 * total.draft_s / total.draft_steps if total.draft_steps else None,
        verify_ms=1e3 * total.verify_s / total.steps if total.steps else None,
        drift=sum(each.naive_s[0] for each in timed) / sum(each.naive_s[-1] for each in timed) if timed else None,
        naive_ms=1e3 * median(naive_s) if naive_s else None,
        identical=all(each.identical for each in comparisons),
        turns=[
            {**about, "decoded_tokens": each.stats.decoded_tokens, "ratios": each.ratios, "speedup": each.speedup}
            for about, each in turns
        ],
    )


def interval_of(ratios: Sequence[Sequence[float]]) -> list[float] | None:
    """Return the 95 % interval of the mean ratio of these turns, by how much repeats of a turn differ.

    So it tells what another measurement of the same questions would find, not of others. None without repeats.
    """
    logs = [[log(each) for each in turn] for turn in ratios if turn]
    num = sum(map(len, logs))
    df = num - len(logs)  # degrees of freedom
    if df < 1:
        return None
    errors = [(each - fmean(turn)) ** 2 for turn in logs for each in turn]
    # Student's t at 97.5 %, within 1 % from two degrees of freedom (expansion by Cornish and Fisher, last term fitted).
    t = 1.96 + 2.37 / df + 2.82 / df**2 + 3.6 / df**3
    mean, error = fmean(map(fmean, logs)), t * sqrt(sum(errors) / df / num)
    return [exp(mean - error), exp(mean + error)]


def remarks_of(points: Sequence[Point]) -> list[str]:
    """Return remarks: points slower than limits, and texts that differ from naive."""
    known = [(point, point.speedup) for point in points if point.speedup is not None]
    lost = [_place(point) for point, speedup in known if speedup < MIN_SPEEDUP]
    lines = [f"{len(lost)} of {len(known)} points below {MIN_SPEEDUP}x{': ' if lost else ''}{'; '.join(lost)}"]
    by_values: dict[str, dict[str, float]] = {}
    for point, speedup in known:
        by_values.setdefault(_words(point.values), {})[point.mode] = speedup
    mixes = registry.names("mix")
    for mixing in mixes:
        shares = {
            place: by_mode[mixing] / max(single)
            for place, by_mode in by_values.items()
            if mixing in by_mode and (single := [by_mode[mode] for mode in by_mode if mode not in mixes])
        }
        if shares:
            less = [f"{place}: {share:.2f}" for place, share in shares.items() if share < MIN_OF_BEST]
            line = f"{mixing} below {MIN_OF_BEST} of the best single drafter at {len(less)} of {len(shares)} points"
            lines.append(f"{line}{': ' if less else ''}{'; '.join(less)}")
    drifted = {_words(point.values): f"{point.drift:.2f}" for point in points if has_drifted(point.drift)}
    if drifted:
        changes = "; ".join(f"{place}: {drift}" for place, drift in drifted.items())
        lines.append(f"the machine changed speed; naive in the last run over the first: {changes}")
    differing = [_place(point) for point in points if not point.identical]
    lines.append(f"text differs from naive: {'; '.join(differing)}" if differing else "all texts identical")
    return lines


def sections_of(points: Sequence[Point]) -> list[Section]:
    """Return tables: speedups with a column per mode, their intervals, and figures of rounds."""
    modes, axes = list(dict.fromkeys(point.mode for point in points)), list(points[0].values)
    by_values: dict[tuple[str, ...], dict[str, Point]] = {}
    for point in points:
        by_values.setdefault(tuple(point.values.values()), {})[point.mode] = point
    best = best_of(points)

    def shown(point: Point) -> str:
        mark = "<" if (point.speedup or 1.0) < MIN_SPEEDUP else "*" if point is best else " "
        return times(point.speedup) + mark

    speedups = [[*values, *(shown(by_mode[mode]) for mode in modes)] for values, by_mode in by_values.items()]
    exact, rounds = [], []
    for point in points:
        place = [*point.values.values(), point.mode]
        interval = " to ".join(map(times, point.interval)) if point.interval else "one run"
        others = map(times, (point.slowest, point.first))
        exact.append([*place, times(point.speedup), interval, *others, "yes" if point.identical else "NO"])
        ms = (number(value, 2) for value in (point.draft_ms, point.verify_ms, point.naive_ms))
        rounds.append([*place, number(point.tau, 2), number(point.alpha, 3), *ms])
    title = f"Speedup over naive (* best, with an interval above all others; < below {MIN_SPEEDUP}x)"
    head = (*axes, "mode", "speedup", "95 % interval", "slowest", "first run", "identical")
    return [
        Section(title, (*axes, *modes), speedups, 0),
        Section("Intervals", head, exact, 0),
        Section("Rounds", (*axes, "mode", "tau", "alpha", "draft ms", "verify ms", "naive ms"), rounds, 0),
    ]


def best_of(points: Sequence[Point]) -> Point | None:
    """Return the fastest point if its interval lies above all others."""
    known = [point for point in points if point.interval]
    best = max(known, key=lambda point: point.speedup or 0.0, default=None)
    others = [point.interval[1] for point in known if point is not best and point.interval]
    return best if best and best.interval and others and best.interval[0] > max(others) else None


def finish(out_dir: Path, name: str, about: dict[str, Any], axes: Sequence[Axis], points: Sequence[Point]) -> None:
    """Write the report and print its tables."""
    settings, sections = about["settings"], sections_of(points)
    plots: list[str] = []
    if can_draw(f"{name}.png"):
        from benchmark.plots import Range, draw_lines

        x_axis = next((axis for axis in axes if len(axis[1]) > 1), axes[0])[0]
        lines: dict[str, list[tuple[str, float | None, Range]]] = {}
        for point in points:
            others = {axis: value for axis, value in point.values.items() if axis != x_axis}
            line = lines.setdefault(f"{point.mode} {_words(others)}".strip(), [])
            line.append((point.values[x_axis], point.speedup, point.interval))
        runs = f"median of {settings['runs']} runs and 95 % interval" if settings["runs"] > 1 else "one run"
        draw_lines(out_dir / f"{name}.png", settings["model"], {f"speedup over naive, {runs}": lines}, x_axis)
        plots = [f"{name}.png"]
    remarks = [tables_at_start(settings), *remarks_of(points)]
    report = Report(
        title=f"{name}: {', '.join(settings['modes'])} on {settings['model']}",
        sections=[*sections, Section("Remarks", text=bullets(remarks))],
        intro="Milliseconds: a draft step, a verify step, a token of naive; without loading, prefill and first tokens.",
        plots=plots,
        settings=about["settings"],
        environment=about["environment"],
    )
    report.publish(out_dir, name, shown=3, remarks=remarks)


def _words(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _place(point: Point) -> str:
    return f"{point.mode} {_words(point.values)}: {times(point.speedup)}"


def line_of(points: Sequence[Point]) -> str:
    """Return a line with the modes' speedups at a point."""
    first = points[0]
    speedups = "  ".join(f"{point.mode} {times(point.speedup)}" for point in points)
    return f"{_words(first.values)}: naive {number(first.naive_ms, 2)} ms/token  {speedups}"
