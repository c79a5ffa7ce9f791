"""Reports for the terminal, Markdown, HTML and CSV."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharesd.cli.console import console, print_line
from sharesd.reports.environment import load_warning
from sharesd.reports.tables import Section, flat
from sharesd_files import atomic_write

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Report of sections, followed by command, settings and machine."""

    title: str
    sections: Sequence[Section]
    intro: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    plots: Sequence[str] = ()  # names of pictures next to the report

    @property
    def warning(self) -> str:
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
        if self.warning:
            console.print(f"[bold]{self.warning}[/]", highlight=False, soft_wrap=True)
        for section in self.sections[:shown]:
            console.print(section.table())
        for line in filter(None, remarks):
            print_line(line)
        if folder is not None:
            atomic_write(folder / f"{stem}.md", self.markdown())
            atomic_write(folder / f"{stem}.html", self.html(folder, **more))
            for i, section in enumerate(each for each in self.sections if each.rows):
                name = re.sub(r"\W+", "-", section.title.partition("(")[0].lower()).strip("-")
                atomic_write(folder / (f"{stem}-{name}.csv" if i else f"{stem}.csv"), section.csv())
            print_line(f"report: {folder / stem}.md")


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent / "data")
    found = Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, autoescape=lambda name: bool(name and ".html" in name)
    )
    found.filters["marked"] = _marked
    found.filters["cell"] = lambda text: str(text).replace("|", "\\|")
    return found


def _marked(text: str) -> Markup:
    """Return escaped text with Markdown's code, bold words and bullets as HTML."""
    from markupsafe import Markup, escape

    found = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"(?m)^( *)- ", r"\1• ", re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", found)))
