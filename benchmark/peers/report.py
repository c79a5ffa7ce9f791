"""The figures as a table on the terminal, and as a page to read: peers.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from benchmark.reports.text import ABSENT, number, percent, times

COLUMNS = ("runtime", "decoding", "tok/s", "x naive", "our best", "own text", "first", "read", "as ours")
LEGEND = (
    "tok/s: generated tokens over the time from the first token to the last; of several prompts at once, all tokens "
    "over all the time, reading included (in brackets: the slowest and the fastest repeat as a whole; else each "
    "batch's fastest). x naive: its speed over that of `sharesd naive`. our best: speed of our fastest mode over its "
    "own. own text: share of answers that a variant gives with exactly the token ids of the runtime's own plain "
    "decoding. first: time from the request to the first token, of several prompts until all have theirs. read: tokens "
    "of the prompts per second of it. as ours: mean number of leading tokens that equal those of `sharesd naive`; "
    "every runtime rounds in its own way, so each takes another turn at some near-tie."
)
NOTES = (
    "One clock times all: it notes when tokens come out of a runtime (the streamers of transformers, the steps of "
    "OpenVINO GenAI and llama.cpp, the generators of llama-cpp-python and ShareSD). The tokens of the first delivery "
    "and the time until then count as prefill; where a runtime drafts before it delivers anything, its first round is "
    "in there too.",
    "Before anything is measured, every variant answers the first prompts once.",
    "transformers: uncompiled, with the attention that the library chooses. `generate()` takes several prompts as one "
    "batch, padded on the left; continuous batching shares no blocks between requests. The assistant is a copy whose "
    "linears are quantized as `--draft-quant` says and run by the kernels of ShareSD's drafter.",
    "OpenVINO GenAI: weights stored as float16 (its GGUF reader knows no bfloat16), computed in the dtype above. "
    "Prefix caching is off, so that prompts seen before are read again, and a step may read `--max-context` tokens. "
    "The draft model is an int4 copy (Q4_0) which drafts as many tokens as `--num-speculative-tokens` says.",
    "llama.cpp: a GGUF file with all matrices in the dtype above, or as the variant says: such weights are another, "
    "smaller model. Several prompts are sequences of one context, by the C interface; its Python package answers one "
    "at a time. Prompt lookup, with the two tokens that the package advises on CPU, is the package's only way to "
    "speculate.",
)
NOISY = 0.1
"""Share of the machine's CPUs in the hands of others from which on a report warns."""


def rich_table(report: Mapping[str, Any]) -> Table:
    """The rows that have figures, for the terminal."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title=_title(report),
        title_justify="left",
        title_style="bold",
    )
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    for row in report["rows"]:
        if row["figures"]:
            table.add_row(
                row["runtime"], row["variant"], number(row["figures"]["tokens_per_second"]), *_cells(row, report)
            )
    return table


def remarks(report: Mapping[str, Any]) -> list[str]:
    """What a reader must not miss: rows without figures and why, texts that changed, a machine with other work."""
    rows = report["rows"]
    lines = [f"{row['runtime']} {row['variant']}: {row['failure']}" for row in rows if row["failure"]]
    changing = [
        f"{r['runtime']} {r['variant']}" for r in rows if r["figures"] and not r["figures"]["same_in_all_repeats"]
    ]
    if changing:
        lines.append(f"another text in another repeat: {', '.join(changing)}")
    others = max((row["figures"]["others_busy"] for row in rows if row["figures"]), default=0.0)
    if others > NOISY:
        lines.append(f"other processes took up to {percent(others)} of the CPUs meanwhile: take the ratios with care")
    return lines


def markdown(report: Mapping[str, Any]) -> str:
    """The whole page."""
    settings = report["settings"]
    environment = {name: value for name, value in report["environment"].items() if value is not None}
    parts = [
        f"# {_title(report)}",
        f"{settings['num_prompts']} prompts ({settings['questions']}, first turns, {settings['prompt_format']}), "
        f"{_asked(settings)}, {settings['num_tokens']} new tokens each whatever end tokens come up, greedy, "
        f"{settings['dtype']} on {settings['device']}, {settings['num_threads']} threads, {settings['repeats']} "
        "repeats. Every runtime has a process of its own; they take turns after each answer, one at a time and each "
        "time in another order.",
        _table(COLUMNS, [_line(row, report) for row in report["rows"]]),
        LEGEND,
        _bullets(remarks(report)),
        "## How it is measured",
        _bullets(NOTES),
        "## How it was run",
        f"```\n{settings['command']}\n```",
        "## Machine",
        _bullets([f"{name}: {value}" for name, value in environment.items()]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _asked(settings: Mapping[str, Any]) -> str:
    lengths, together = settings["prompt_tokens"], settings["concurrency"]
    how = "one by one" if together == 1 else f"{together} at once"
    return f"{min(lengths)} to {max(lengths)} tokens long, asked {how}"


def _title(report: Mapping[str, Any]) -> str:
    return f"ShareSD and its peers: {report['settings']['model']}"


def _line(row: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    """A row of the page."""
    name = f"{row['variant']}: {row['how']}"
    if not row["figures"]:
        return [row["runtime"], name, *[ABSENT] * (len(COLUMNS) - 2)]
    low, high = row["figures"]["tokens_per_second_range"]
    speed = f"{number(row['figures']['tokens_per_second'])} ({low:.1f} to {high:.1f})"
    return [row["runtime"], name, speed, *_cells(row, report)]


def _cells(row: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    """The columns after the speed."""
    found = row["figures"]
    leading = found["leading_as_naive"]
    return [
        times(found["ratio_to_naive"]),
        times(found["best_mode_ratio"]),
        percent(found["same_as_plain"]),
        f"{1e3 * found['first_token_s']:.0f} ms",
        number(found["read_per_second"], 0),
        ABSENT if leading is None else f"{leading:.0f}/{report['settings']['num_tokens']}",
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---" if i < 2 else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
