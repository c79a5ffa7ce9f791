"""The figures as a table on the terminal, and as a page to read: peers.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from benchmark.text import ABSENT, number, percent, times

COLUMNS = ("runtime", "decoding", "tok/s", "range", "to our naive", "our best is", "own text", "first token", "as ours")
LEGEND = (
    "tok/s: generated tokens over the time from the first token to the last, median of the repeats; range: slowest and "
    "fastest repeat. to our naive: its speed over that of `sharesd naive`, repeat by repeat. our best is: how many "
    "times its speed our fastest mode has. own text: answers that a speculative variant gives with exactly the token "
    "ids of the runtime's own plain decoding. first token: median time from the request to the first token. as ours: "
    "mean number of leading tokens that equal those of `sharesd naive`; other kernels round differently, so plain "
    "decoding of another runtime takes another turn somewhere."
)


def rich_table(report: Mapping[str, Any]) -> Table:
    """The table for the terminal; reasons of rows without numbers in a column of their own width."""
    table = Table(box=box.SIMPLE_HEAD, title=_title(report), title_justify="left", title_style="bold")
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=i != 1)
    for row in report["rows"]:
        if row["failure"] is None:
            table.add_row(*_cells(row, report))
    return table


def failures(report: Mapping[str, Any]) -> list[str]:
    """A line for each row without numbers."""
    return [f"{row['runtime']} {row['variant']}: {row['failure']}" for row in report["rows"] if row["failure"]]


def markdown(report: Mapping[str, Any]) -> str:
    """The whole page."""
    settings, lines = report["settings"], []
    for row in report["rows"]:
        if row["failure"] is None:
            lines.append(_cells(row, report))
        else:
            cells = [row["runtime"], f"{row['variant']}: {row['how']}", *[ABSENT] * (len(COLUMNS) - 2)]
            lines.append(cells)
    notes = [f"- {text}" for text in failures(report)]
    unsteady = [f"`{r['runtime']} {r['variant']}`" for r in report["rows"] if r["same_in_all_repeats"] is False]
    if unsteady:
        notes.append(f"- Not the same text in all repeats: {', '.join(unsteady)}.")
    parts = [
        f"# {_title(report)}",
        f"{settings['num_prompts']} prompts ({settings['questions']}, first turns, {settings['prompt_format']}), "
        f"{settings['num_tokens']} new tokens each whatever end tokens come up, greedy, {settings['dtype']} on "
        f"{settings['device']}, {settings['num_threads']} threads, {settings['repeats']} repeats. Every runtime has a "
        "process of its own; they take turns prompt by prompt, each time in another order, one at a time.",
        "\n".join(["| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *lines)]),
        LEGEND,
        "\n".join(notes),
        "## Notes\n\n" + "\n".join(f"- {note}" for note in _NOTES),
        "## How it was run\n\n```\n" + settings["command"] + "\n```",
        "## Machine\n\n" + "\n".join(f"- {name}: {value}" for name, value in report["environment"].items() if value),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_NOTES = (
    "One clock times all: it notes when tokens come out of a runtime (the streamer of transformers and OpenVINO GenAI, "
    "the generators of llama-cpp-python and ShareSD). The tokens of the first delivery and the time until then count "
    "as prefill; where a runtime drafts before it delivers anything, its first round is in there too.",
    "Before anything is measured, every variant answers the first prompt once.",
    "transformers: `generate()` uncompiled with the library's own choice of attention; its assistant is a copy whose "
    "linears are quantized as `--quant` says, run by the kernels that ShareSD's drafter uses.",
    "OpenVINO GenAI: weights stored as float16 (its GGUF reader knows no bfloat16) and computed in the dtype above; "
    "prefix caching is off, so that prompts seen before are read again; the draft model is an int4 (Q4_0) copy that "
    "drafts as many tokens as `--num-draft` says.",
    "llama.cpp: a GGUF file with matrices in the dtype above; its embedding and head too. Its Python package offers "
    "prompt lookup as its only way to speculate.",
)


def _title(report: Mapping[str, Any]) -> str:
    return f"ShareSD and its peers: {report['settings']['model']}"


def _cells(row: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    low, high = row["tokens_per_second_range"]
    leading = row["leading_tokens_as_naive"]
    return [
        row["runtime"],
        f"{row['variant']}: {row['how']}",
        number(row["tokens_per_second"]),
        f"{low:.1f} to {high:.1f}",
        times(row["ratio_to_naive"]),
        times(row["best_mode_ratio"]),
        percent(row["same_as_plain"]),
        f"{1e3 * row['first_token_s']:.0f} ms",
        ABSENT if leading is None else f"{leading:.0f} of {report['settings']['num_tokens']}",
    ]
