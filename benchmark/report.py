"""Reports for the terminal, Markdown, HTML and CSV, and JSON files."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharesd_files import atomic_write

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.table import Table

ABSENT = "-"
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
        from rich.table import Table

        table = Table(title=self.title or None, box=None, title_justify="left", header_style="")
        for i, name in enumerate(self.head):
            table.add_column(name, justify="left" if i < self.left else "right", no_wrap=i >= self.left)
        for row in self.rows:
            table.add_row(*row)
        return table

    def csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.head, *self.rows])
        return text.getvalue()


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Report of sections, followed by command, settings and machine."""

    title: str
    sections: Sequence[Section]
    intro: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    plots: Sequence[str] = ()  # names of pictures beside the report

    @property
    def warning(self) -> str:
        from sharesd.cli.environment import load_warning

        return load_warning(self.environment)

    def markdown(self) -> str:
        facts = {"settings": flat(self.settings), "environment": flat(self.environment)}
        text = _templates().get_template("report.md.jinja").render(report=self, **facts)
        return re.sub(r"\n{3,}", "\n\n", re.sub(r" +\n", "\n", text)).strip() + "\n"

    def html(self, folder: Path, **more: Any) -> str:
        """Return the report as HTML; `more` are further variables of the template."""
        plots = [(name, base64.b64encode((folder / name).read_bytes()).decode()) for name in self.plots]
        return _templates().get_template("report.html.jinja").render(report=self, plots=plots, **more)

    def publish(
        self, folder: Path | None, stem: str, *, shown: int = 1, remarks: Sequence[str] = (), **more: Any
    ) -> None:
        """Print first tables and remarks; write `stem`.md, .html and .csv into `folder`."""
        from sharesd.cli.console import console

        if self.warning:
            console.print(f"[bold]{self.warning}[/]", highlight=False, soft_wrap=True)
        for section in self.sections[:shown]:
            console.print(section.table())
        for line in filter(None, remarks):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if folder is not None:
            atomic_write(folder / f"{stem}.md", self.markdown())
            atomic_write(folder / f"{stem}.html", self.html(folder, **more))
            for i, section in enumerate(each for each in self.sections if each.rows):
                name = re.sub(r"\W+", "-", section.title.partition("(")[0].lower()).strip("-")
                atomic_write(folder / (f"{stem}-{name}.csv" if i else f"{stem}.csv"), section.csv())
            console.print(f"report: {folder / stem}.md", markup=False, highlight=False, soft_wrap=True)


def bullets(lines: Sequence[str]) -> str:
    """Return the lines as a Markdown list, without empty lines."""
    return "\n".join(f"- {line}" for line in filter(None, lines))


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent / "data")
    found = Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, autoescape=lambda name: bool(name and ".html" in name)
    )
    found.filters["cell"] = lambda text: str(text).replace("|", "\\|")
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as indented JSON, atomically."""
    atomic_write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; ValueError if missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist, so there is nothing to resume; drop --resume") from None
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


def has_drifted(ratio: float | None) -> bool:
    """Return True if speeds of first and last run differ much."""
    return ratio is not None and max(ratio, 1 / ratio) > 1 + MAX_DRIFT


def number(value: float | None, digits: int = 1) -> str:
    """Return `12.3`, or `-` for None."""
    return ABSENT if value is None else f"{value:.{digits}f}"


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
