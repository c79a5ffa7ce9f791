"""Plots of results, in a palette for colour-blind readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmark.questions.summary import accepted_positions
from sharesd.drafters import registry
from sharesd.reports.pictures import finish, save

Range = Sequence[float] | None  # least and greatest of several runs
Line = Sequence[tuple[Any, float | None, Range]]  # points; those without a value are left out


def draw_plots(folder: Path, title: str, summary: Mapping[str, Any]) -> list[str]:
    """Draw speed by category and acceptance by position; return file names."""
    modes = {mode: figures for mode, figures in summary["modes"].items() if figures["tokens_per_second"]}
    drawn = []
    if modes:
        categories = list(dict.fromkeys(name for figures in modes.values() for name in figures["by_category"]))
        groups = ["all", *(categories if len(categories) > 1 else [])]
        bars, labels, ranges = {}, {}, {}
        for mode, figures in modes.items():
            parts = [figures, *(figures["by_category"].get(category, {}) for category in groups[1:])]
            bars[mode] = [part.get("tokens_per_second") or 0.0 for part in parts]
            ranges[mode] = [part.get("tokens_per_second_range") for part in parts]
            ratios = [part.get("speedup") if mode != "naive" else None for part in parts]
            labels[mode] = [f"{ratio:.2f}x" if ratio else "" for ratio in ratios]
        num_runs = min(figures["num_runs"] for figures in modes.values())
        what = f"tokens per second, {f'median and range of {num_runs} runs' if num_runs > 1 else 'one run'}"
        _bars(folder / "speed.png", f"Decoding speed\n{title}", what, groups, bars, labels, ranges)
        drawn.append("speed.png")
    if accepted := accepted_positions(modes):
        groups = [str(i + 1) for i in range(max(map(len, accepted.values())))]
        bars = {mode: [100 * share for share in shares] for mode, shares in accepted.items()}
        labels = {mode: [f"{share:.0f}" if len(groups) <= 8 else "" for share in bars[mode]] for mode in bars}
        _bars(folder / "acceptance.png", f"Accepted draft tokens\n{title}", "% of rounds", groups, bars, labels)
        drawn.append("acceptance.png")
    return drawn


def draw_runs(path: Path, runs: Mapping[str, Any]) -> str:
    """Draw tokens per second of several runs' modes; return the file's name."""
    modes = list(dict.fromkeys(mode for found in runs.values() for mode in found["modes"]))
    bars, labels, ranges = {}, {}, {}
    for name, found in runs.items():
        each = [found["modes"].get(mode, {}) for mode in modes]
        bars[name] = [figures.get("tokens_per_second") or 0.0 for figures in each]
        labels[name] = [f"{figures['speedup']:.2f}x" if figures.get("speedup") else "" for figures in each]
        ranges[name] = [figures.get("tokens_per_second_range") for figures in each]
    _bars(path, "Decoding speed, and speedup over naive of the run", "tokens per second", modes, bars, labels, ranges)
    return path.name


def _bars(
    path: Path,
    title: str,
    what: str,
    groups: Sequence[str],
    bars: Mapping[str, Sequence[float]],
    labels: Mapping[str, Sequence[str]],
    ranges: Mapping[str, Sequence[Range]] | None = None,
) -> None:
    figure = Figure(figsize=(max(7, 3 + len(groups) * max(1.0, 0.14 * len(bars))), 4.5), dpi=150, layout="constrained")
    axes, width = figure.add_subplot(), 0.8 / len(bars)
    for i, (mode, heights) in enumerate(bars.items()):
        style: dict[str, Any] = {"hatch": registry.hatch_of(mode), "edgecolor": "white", "linewidth": 0.5}
        x = [group - 0.4 + (i + 0.5) * width for group in range(len(heights))]
        axes.bar(x, heights, width, label=mode, color=registry.colour_of(mode, i), **style)
        around = _errors(heights, ranges[mode]) if ranges else [[0.0] * len(heights)] * 2
        for colour, thick in (("white", 3), ("#333333", 1)) if ranges else ():  # seen on dark bars as well
            axes.errorbar(x, heights, around, fmt="none", ecolor=colour, elinewidth=thick, capsize=thick + 1)
        for place, height, above, label in zip(x, heights, around[1], labels[mode], strict=True):
            at: dict[str, Any] = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center", "va": "bottom"}
            axes.annotate(label, (place, height + above), fontsize=8, rotation=90, **at)
    axes.set_xticks(range(len(groups)), groups)
    finish(axes, title, what)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    save(path, figure)


def draw_lines(path: Path, title: str, panels: Mapping[str, Mapping[str, Line]], x_label: str) -> None:
    """Draw a panel per quantity, a line per name, x equally spaced."""
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(7 if columns == 1 else 10, 4.5 if rows == 1 else 7), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=10)
    panes = figure.subplots(rows, columns, squeeze=False).flat
    xs = list(dict.fromkeys(x for lines in panels.values() for line in lines.values() for x, *_ in line))
    for axes, (what, lines) in zip(panes, panels.items(), strict=False):
        for i, (name, line) in enumerate(lines.items()):
            aside = 0.02 * (i - (len(lines) - 1) / 2)  # so that no bar hides another
            known = [(xs.index(x) + aside, y, around) for x, y, around in line if y is not None]
            dashes = "--" if name.split()[-1].startswith("p9") else "-"
            colour = registry.colour_of(name.split()[0])
            if known:
                places, heights, ranges = zip(*known, strict=True)
                errors = _errors(heights, ranges)
                axes.errorbar(places, heights, errors, fmt=dashes, marker="o", color=colour, label=name, capsize=3)
        axes.set_xticks(range(len(xs)), [str(x) for x in xs])
        axes.set_xlabel(x_label)
        finish(axes, "", what)
        axes.set_ylim(bottom=0)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    save(path, figure)


def _errors(heights: Sequence[float], ranges: Sequence[Range]) -> list[list[float]]:
    """Return error bars below and above, 0 without a range."""
    pairs = [around or (height, height) for height, around in zip(heights, ranges, strict=True)]
    below = [max(0.0, height - low) for height, (low, _) in zip(heights, pairs, strict=True)]
    return [below, [max(0.0, high - height) for height, (_, high) in zip(heights, pairs, strict=True)]]
