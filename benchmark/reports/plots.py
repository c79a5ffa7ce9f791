"""Pictures of a summary: speed by category, acceptance by position. Colours are told apart by colour-blind eyes too."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark.reports.summary import accepted_positions
from benchmark.reports.table import tables_from

COLOURS = {
    "naive": "#999999",
    "classic": "#E69F00",
    "share": "#0072B2",
    "eagle": "#332288",
    "parallel": "#882255",
    "glide": "#AA4499",
    "ngram": "#F0E442",
    "suffix": "#009E73",
    "recycle": "#D55E00",
    "hybrid": "#56B4E9",
}
"""Of the palette of Okabe and Ito (2008); those of heads of Tol's (2021)."""
SPARE_COLOUR = "#CC79A7"
HATCHES = {"classic": "//"}
"""So that prints without colours can be read."""


def draw_plots(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """Write the pictures that the summary has figures for; returns their file names."""
    modes = {mode: figures for mode, figures in summary["modes"].items() if figures["tokens_per_second"]}
    settings = summary["settings"]
    title = "\n".join(filter(None, [f"{settings['model']} on {settings['questions']['label']}", tables_from(settings)]))
    drawn: list[str] = []
    if modes:
        _save(
            folder / "speed.png", lambda axes: _speed(axes, modes, title), width=_width(len(_groups(modes)), len(modes))
        )
        drawn.append("speed.png")
    drafters = accepted_positions(modes)
    if drafters:
        num_draft = max(map(len, drafters.values()))
        _save(
            folder / "acceptance.png",
            lambda axes: _acceptance(axes, drafters, title),
            width=_width(num_draft, len(drafters)),
        )
        drawn.append("acceptance.png")
    return drawn


def _speed(axes: Axes, modes: Mapping[str, Any], title: str) -> None:
    groups = _groups(modes)
    for mode, x, width in _bars(modes, len(groups)):
        figures = modes[mode]
        parts = [figures, *(figures["by_category"].get(category, {}) for category in groups[1:])]
        bars = axes.bar(x, [part.get("tokens_per_second") or 0 for part in parts], width, label=mode, **_style(mode))
        if mode != "naive":
            ratios = [part.get("speedup_vs_naive") for part in parts]
            labels = [f"{ratio:.2f}x" if ratio else "" for ratio in ratios]
            axes.bar_label(bars, labels, fontsize=8, padding=3, rotation=90)
    axes.set_xticks(range(len(groups)), groups)
    axes.get_xticklabels()[0].set_fontweight("bold")
    if len(groups) > 1:
        axes.axvline(0.5, color="#cccccc", linewidth=0.8)
    axes.set_ylabel("generated tokens per second")
    axes.set_title(f"Decoding speed\n{title}", fontsize=10)
    axes.margins(y=0.15)


def _groups(modes: Mapping[str, Any]) -> list[str]:
    """`all`, then the categories where there are several."""
    categories = list(dict.fromkeys(name for figures in modes.values() for name in figures["by_category"]))
    return ["all", *(categories if len(categories) > 1 else [])]


def _acceptance(axes: Axes, drafters: Mapping[str, list[float]], title: str) -> None:
    num_draft = max(map(len, drafters.values()))
    for mode, x, width in _bars(drafters, num_draft):
        shares = [100 * share for share in drafters[mode]]
        bars = axes.bar(x, shares, width, label=mode, **_style(mode))
        if num_draft <= 8:
            axes.bar_label(bars, [f"{share:.0f}" for share in shares], fontsize=8, padding=2)
    axes.set_xticks(range(num_draft), [str(i + 1) for i in range(num_draft)])
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("rounds in which it was accepted (%)")
    axes.set_ylim(0, 108)
    axes.set_yticks(range(0, 101, 20))
    axes.set_title(f"Accepted draft tokens\n{title}", fontsize=10)


def _width(num_groups: int, num_modes: int) -> float:
    """Inches of a picture in which the labels of neighbouring bars do not overlap."""
    return 3 + num_groups * max(1.0, 0.14 * num_modes)


def _bars(modes: Mapping[str, Any], num_groups: int) -> list[tuple[str, list[float], float]]:
    """For each mode: its name, the middles of its bars, their width."""
    width = 0.8 / len(modes)
    first = -0.4 + width / 2
    return [(mode, [group + first + i * width for group in range(num_groups)], width) for i, mode in enumerate(modes)]


def _style(mode: str) -> dict[str, Any]:
    return {
        "color": COLOURS.get(mode, SPARE_COLOUR),
        "hatch": HATCHES.get(mode),
        "edgecolor": "white",
        "linewidth": 0.5,
    }


def _save(path: Path, draw: Callable[[Axes], None], *, width: float) -> None:
    figure = Figure(figsize=(max(width, 7), 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    draw(axes)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    save_figure(path, figure)


def save_figure(path: Path, figure: Figure) -> None:
    """Write a picture as a whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(draft, format="png")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
