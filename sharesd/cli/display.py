"""Display of answers, colored by token source, and of round statistics."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from rich import box
from rich.color import ColorSystem
from rich.style import Style
from rich.table import Table
from rich.text import Text

from compile.start_times import StartTimes
from sharesd.cli.console import console
from sharesd.engine.outputs import Source, TokenChunk
from sharesd.engine.stats import Stats
from sharesd.models.text_stream import TextStream
from sharesd.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sharesd.runtime import LoadReport

COLORS: dict[Source, str] = {"target": "none", "accepted": "green", "recovered": "yellow", "bonus": "cyan"}
MEANINGS: dict[Source, str] = {
    "target": "plain step",
    "accepted": "accepted draft",
    "recovered": "recovered after a miss",
    "bonus": "bonus",
}
assert set(COLORS) == set(MEANINGS) == set(get_args(Source))


class AnswerWriter:
    """Writer of answers to stdout, one after the other.

    If `by_source`, tokens are colored, and a drafter is named where it differs from the one before.
    """

    def __init__(self, tokenizer: Tokenizer, *, titles: Sequence[str], by_source: bool) -> None:
        self._tokenizer, self._titles = tokenizer, titles
        self._colored = by_source and shows_colors()
        self._waiting: list[list[TokenChunk]] = [[] for _ in titles]  # chunks of answers after the current one
        self._row = -1  # the answer that is being written
        self._named: str | None = None  # drafter of its last accepted token
        self._open = False

    def write(self, chunk: TokenChunk) -> None:
        """Print the text of a chunk once all earlier answers have ended."""
        self._waiting[chunk.row].append(chunk)
        while not self._open or self._waiting[self._row]:
            if not self._open:
                if self._row + 1 == len(self._titles):
                    return
                self._begin()
            self._write(self._waiting[self._row].pop(0))

    def end(self) -> None:
        if self._open:
            print(flush=True)
        self._open = False

    def _begin(self) -> None:
        self._row, self._open = self._row + 1, True
        self._sourced, self._named = SourcedText(self._tokenizer), None
        if len(self._titles) > 1:
            between = "\n" if self._row else ""
            print(f"{between}[{self._row + 1}/{len(self._titles)}] {self._titles[self._row]}")

    def _write(self, chunk: TokenChunk) -> None:
        if self._colored:
            for text, source, drafter in self._sourced.split(chunk):
                if drafter not in (None, self._named):
                    self._named = drafter
                    sys.stdout.write(_styled(f"[{drafter}]", "dim"))
                sys.stdout.write(_styled(text, COLORS[source]))
        else:
            sys.stdout.write(chunk.text)
        sys.stdout.flush()
        if chunk.finish_reason:
            self.end()


def _styled(text: str, style: str) -> str:
    return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)


class SourcedText:
    """Splitter of one row's text by source and drafter.

    Text is emitted once its characters are complete and no stop string is possible.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)
        self._waiting: deque[tuple[str, Source, str | None]] = deque()

    def split(self, chunk: TokenChunk) -> list[tuple[str, Source, str | None]]:
        for token, source, drafter in zip(chunk.token_ids, chunk.sources, chunk.drafters, strict=True):
            self._waiting.append((self._stream.push([token]), source, drafter))
        if chunk.finish_reason and chunk.sources:
            self._waiting.append((self._stream.finish(), chunk.sources[-1], chunk.drafters[-1]))
        pieces, left = [], len(chunk.text)
        while left:
            text, source, drafter = self._waiting.popleft()
            if len(text) > left:
                self._waiting.appendleft((text[left:], source, drafter))
            if text:
                pieces.append((text[:left], source, drafter))
            left -= min(left, len(text))
        return pieces


def shows_colors() -> bool:
    """Return True if stdout is a colored terminal and NO_COLOR is unset."""
    return console.color_system is not None and not console.no_color


def legend() -> Text:
    parts = [Text(f"■ {MEANINGS[source]}", style=color) for source, color in COLORS.items()]
    return Text("  ").join([*parts, Text("[drafter] of the accepted tokens after it", style="dim")])


def stats_table(columns: Mapping[str, Stats], report: LoadReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=len(columns) > 1, header_style="none")
    table.add_column()
    for name in columns:
        table.add_column(name, justify="right")
    shown = [_shown(stats, report) for stats in columns.values()]
    for label in dict.fromkeys(label for rows in sorted(shown, key=len, reverse=True) for label in rows):
        table.add_row(label, *(rows.get(label, "") for rows in shown))
    table.add_section()
    if report.quant is not None:
        table.add_row("quantized", report.quant.spec)
    table.add_row("context", f"{report.max_context:,} tokens")
    return table


def start_table(start: StartTimes) -> Table:
    """Return the seconds of each phase of a start, and their sum."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, seconds in start.seconds.items():
        table.add_row(name, f"{seconds:.2f} s")
    table.add_section()
    table.add_row("start", f"{start.total:.2f} s")
    return table


def one_line(stats: Stats) -> str:
    tau = f", {stats.tau:.2f} tokens per round" if stats.num_draft else ""
    return (
        f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tok/s{tau}, prompt read in {stats.prefill_s:.2f} s"
    )


def stats_dict(stats: Stats, report: LoadReport) -> dict[str, Any]:
    """Return the statistics for JSON."""
    return {
        **stats.to_dict(),
        **_moved(stats, report),
        "load_seconds": report.load_seconds,
        "compile_seconds": report.compile_seconds,
    }


def _shown(stats: Stats, report: LoadReport) -> dict[str, str]:
    draft, verify, overhead = _round_ms(stats)
    rows = {
        "prompt": f"{stats.prompt_tokens} tokens",
        "prefill": f"{stats.prefill_s * 1e3:.0f} ms",
        "answer": f"{stats.new_tokens} tokens",
        "speed": f"{stats.tokens_per_second:.1f} tok/s",
    }
    moved = _moved(stats, report)
    if moved:
        rows["resident"] = f"{moved['resident_share']:.0%} of blocks"
        rows["moved"] = f"{moved['bytes_per_token'] / 1e6:.1f} MB/token"
        if report.predicted is not None:
            rows["predicted"] = f"{report.predicted:.1f} tok/s"
        rows["link in use"] = f"{moved['link_utilisation']:.0%}"
    if not stats.num_draft:
        return rows | {"verify": f"{verify:.1f} ms", "overhead": f"{overhead:.1f} ms"}
    return rows | {
        "tau (tokens/round)": f"{stats.tau:.2f} of {1 + stats.num_draft}",
        "alpha (accepted)": f"{stats.alpha:.2f}",
        "by position": " ".join(f"{share:.2f}" for share in stats.acceptance_by_position),
        "draft": f"{draft:.1f} ms",
        **({"draft step": f"{stats.draft_s / stats.draft_steps * 1e3:.2f} ms"} if stats.draft_steps else {}),
        "verify": f"{verify:.1f} ms",
        "overhead": f"{overhead:.1f} ms",
    }


def _moved(stats: Stats, report: LoadReport) -> dict[str, float]:
    """Return statistics of offloaded weights; empty without offloading."""
    if stats.traffic is None:
        return {}
    predicted = {} if report.predicted is None else {"predicted_tokens_per_second": report.predicted}
    return predicted | {
        "resident_share": report.resident_share,
        "bytes_per_token": stats.traffic.num_bytes / max(1, stats.new_tokens),
        "link_utilisation": stats.traffic.utilisation,
    }


def _round_ms(stats: Stats) -> tuple[float, float, float]:
    steps = max(1, stats.steps)
    return stats.draft_s / steps * 1e3, stats.verify_s / steps * 1e3, stats.overhead_s / steps * 1e3
