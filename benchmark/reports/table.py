"""The headline of a summary as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from benchmark.reports.text import number, percent, size, times
from sharesd.config import EMBEDDED_CORPUS, EMBEDDED_TABLE

HEADLINE = ("mode", "tok/s", "speedup", "tau", "alpha", "identical", "first token", "extra mem")
"""Columns of the headline table, here and in the report."""
SHIPPED = (EMBEDDED_CORPUS.name, EMBEDDED_TABLE.name)
"""How settings name what comes with the embedded model."""


def headline(summary: Mapping[str, Any]) -> list[list[str]]:
    """One row per mode, in the order of HEADLINE."""
    return [
        [
            mode,
            number(figures["tokens_per_second"]),
            times(figures["speedup_vs_naive"]),
            number(figures["mean_tokens_per_round"], 2),
            number(figures["alpha"], 3),
            percent(figures["identical_to_naive"]),
            f"{1e3 * figures['time_to_first_token_s']['median']:.0f} ms",
            size(extra_bytes(figures)),
        ]
        for mode, figures in summary["modes"].items()
    ]


def tables_from(settings: Mapping[str, Any]) -> str:
    """What tables held before the first question, as a sentence; empty where no mode has one that can hold anything.

    It stands beside every figure: what ships with the embedded model helps that model alone.
    """
    drafters = (*settings["modes"], *(settings["hybrid_with"] if "hybrid" in settings["modes"] else ()))
    by_content: dict[str, list[str]] = {}
    for drafter, name in (("suffix", "corpus"), ("recycle", "recycle_table")):
        if drafter in drafters:
            by_content.setdefault(_content(settings[name]), []).append(drafter)
    parts = [f"{' and '.join(names)} {content}" for content, names in by_content.items()]
    return f"Tables at the start: {', '.join(parts)}." if parts else ""


def _content(file: str) -> str:
    if file == "empty":
        return file
    return "with the embedded model's own answers" if file in SHIPPED else f"with {file}"


def extra_bytes(figures: Mapping[str, Any]) -> int | None:
    """Bytes of weights and KV on top of naive decoding."""
    weights, kv = figures.get("extra_weight_bytes"), figures.get("extra_kv_bytes")
    return None if weights is None or kv is None else weights + kv


def rich_table(summary: Mapping[str, Any]) -> Table:
    """The headline for the terminal."""
    settings = summary["settings"]
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"{settings['model']} · {settings['questions']['label']}",
        title_justify="left",
        title_style="bold",
        caption=tables_from(settings) or None,
        caption_justify="left",
    )
    for name in HEADLINE:
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for row in headline(summary):
        table.add_row(*row)
    return table
