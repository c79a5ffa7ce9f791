"""The picture of a sweep: latency and throughput against the rate of requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark.reports.plots import COLOURS, save_figure
from benchmark.serve.figures import percentile_name
from benchmark.serve.session import Run

PANELS = {
    "ttft": "time to first token (ms)",
    "tpot": "time per output token (ms)",
    "e2el": "end-to-end latency (ms)",
}


def draw(path: Path, title: str, runs: Sequence[Run], percentiles: Sequence[float]) -> None:
    """Write the picture."""
    save_figure(path, picture(title, runs, percentiles))


def picture(title: str, runs: Sequence[Run], percentiles: Sequence[float]) -> Figure:
    """A panel for each latency and one for throughput; a colour per mode, medians solid, the last percentile dashed.

    Rates stand at equal distances, so that a sweep over powers of two, or up to `inf`, can be read.
    """
    rates = sorted({run.rate for run in runs})
    modes = list(dict.fromkeys(run.mode for run in runs))
    tail = percentile_name(max(percentiles))
    figure = Figure(figsize=(10, 7), dpi=150, layout="constrained")
    figure.suptitle(f"Latency against the rate of requests\n{title}", fontsize=10)
    panels = figure.subplots(2, 2)
    for place, (metric, label) in zip(panels.flat, PANELS.items(), strict=False):
        _axes(place, rates, label)
        for mode in modes:
            _line(place, rates, runs, mode, f"median_{metric}_ms", f"{mode or ''} median".strip())
            _line(place, rates, runs, mode, f"{tail}_{metric}_ms", f"{mode or ''} {tail}".strip(), linestyle="--")
    last = panels[1, 1]
    _axes(last, rates, "output tokens per second")
    for mode in modes:
        _line(last, rates, runs, mode, "output_throughput", "")
    for place in panels.flat:
        place.set_ylim(bottom=0)  # only now: it ends the adjustment of the top
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    return figure


def _axes(place: Axes, rates: Sequence[float], label: str) -> None:
    place.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    place.set_xlabel("requests per second")
    place.set_ylabel(label)
    place.margins(y=0.1)
    place.spines[["top", "right"]].set_visible(False)
    place.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    place.set_axisbelow(True)


def _line(
    place: Axes,
    rates: Sequence[float],
    runs: Sequence[Run],
    mode: str | None,
    key: str,
    label: str,
    linestyle: str = "-",
) -> None:
    points = sorted((rates.index(run.rate), run.result[key]) for run in runs if run.mode == mode)
    known = [(x, y) for x, y in points if y is not None]  # nothing was answered at the others
    colour = COLOURS.get(mode or "", COLOURS["share"])
    place.plot([x for x, _ in known], [y for _, y in known], linestyle, marker="o", color=colour, label=label)
