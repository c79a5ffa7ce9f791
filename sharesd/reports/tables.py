"""Tables of reports, their numbers as text, and JSON files."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from sharesd_files import atomic_write

ABSENT = "-"
FIGURE = re.compile(r"(-?[\d.]+)x?(?: \((-?[\d.]+)x? to (-?[\d.]+)x?\))?")
"""Number, perhaps a ratio (1.23x), with the range of its runs."""
DIGITS = {"tokens_per_second": 1, "c": 3, "v": 3, "alpha": 3, "draft_share": 3, "overhead_share": 3}
MAX_COLUMNS = 12
MAX_DRIFT = 0.15  # share by which the speed of naive may differ between first and last run


@dataclass(frozen=True, slots=True)
class Section:
    """Table with a text below; either may be empty."""

    title: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    left: int = 1  # leading columns that hold names; the others hold figures
    text: str = ""

    def table(self) -> Table:
        table = Table(title=self.title or None, box=None, title_justify="left", header_style="")
        for i, name in enumerate(self.head):
            table.add_column(name, justify="left" if i < self.left else "right", no_wrap=i >= self.left)
        for row in self.rows:
            table.add_row(*row)
        return table

    def parts(self) -> list[Section]:
        """Return tables of at most MAX_COLUMNS columns; each has those that hold names."""
        step = MAX_COLUMNS - self.left
        places = [slice(first, first + step) for first in range(self.left, max(len(self.head), self.left + 1), step)]
        tables = [[[*row[: self.left], *row[place]] for row in (self.head, *self.rows)] for place in places]
        return [replace(self, head=head, rows=rows) for head, *rows in tables]

    def csv(self) -> str:
        """Return CSV with plain numbers, and ranges in their own columns."""
        columns: list[list[str]] = []
        for i, name in enumerate(self.head):
            cells = [row[i] if i < len(row) else ABSENT for row in self.rows]
            found = [FIGURE.fullmatch(cell) if i >= self.left else None for cell in cells]
            columns += [[name, *("" if c == ABSENT else f[1] if f else c for c, f in zip(cells, found, strict=True))]]
            if any(each and each[2] for each in found):
                for part, end in enumerate(("min", "max"), 2):
                    columns += [[f"{name} {end}", *(each[part] or each[1] if each else "" for each in found)]]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(zip(*columns, strict=True))
        return text.getvalue()


def bullets(lines: Sequence[str]) -> str:
    """Return the lines as a Markdown list, without empty lines."""
    return "\n".join(f"- {line}" for line in filter(None, lines))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as indented JSON, atomically."""
    atomic_write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; ValueError if missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist, so there is nothing to resume; remove --resume") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); use another --out-dir") from error


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names, without empty values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif value not in (None, ""):
            found[f"{prefix}{name}"] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return found


def differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values, by name, of flat settings that differ."""
    names = dict.fromkeys(name for each in settings for name in each)
    found = {name: [each.get(name) for each in settings] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def has_drifted(ratio: float | None) -> bool:
    """Return True if speeds of first and last run differ much."""
    return ratio is not None and max(ratio, 1 / ratio) > 1 + MAX_DRIFT


def number(value: float | None, digits: int = 1) -> str:
    """Return `12.3`, or `-` for None."""
    return ABSENT if value is None else f"{value:.{digits}f}"


def ranged(figures: Mapping[str, Any], name: str, digits: int | None = None) -> str:
    """Return a figure, and its range if there are several runs."""
    low, high = figures.get(f"{name}_range") or (None, None)
    digits = DIGITS.get(name, 2) if digits is None else digits
    unit = "x" if name == "speedup" else ""
    text = number(figures.get(name), digits) + (unit if figures.get(name) is not None else "")
    return text if low == high else f"{text} ({number(low, digits)} to {number(high, digits)})"


def spread(name: str, runs: Iterable[Mapping[str, float | None]]) -> dict[str, Any]:
    """Return median and range over runs, as `name` and `name_range`."""
    known = [value for run in runs if (value := run[name]) is not None]
    return {name: median(known) if known else None, f"{name}_range": [min(known), max(known)] if known else None}


def times(value: float | None) -> str:
    """Return `1.23x`, or `-` for None."""
    return ABSENT if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """Return e.g. `97.5 %`, never rounded up to 100; `-` for None."""
    if value is None:
        return ABSENT
    return "100 %" if value == 1 else f"{min(100 * value, 99.9):.1f} %"


def size(num_bytes: float | None) -> str:
    """Return `98.4 MB` or `1.25 GB` (powers of ten); `-` for None."""
    if not num_bytes:
        return ABSENT if num_bytes is None else "0"
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
