"""Write docs/reference/cli.md from the parsers of all commands: `python scripts/cli_reference.py`.

Groups of flags that several commands have are written once, at the end, and linked.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmark.__main__ import make_parser as bench_parser  # noqa: E402
from serve.command import make_parser as serve_parser  # noqa: E402
from sharesd.cli.main import make_parser  # noqa: E402
from sharesd.cli.parse_types import SIZES  # noqa: E402
from sharesd.cli.parser import program  # noqa: E402
from sharesd_command import COMMANDS, NAME  # noqa: E402
from train.__main__ import make_parser as train_parser  # noqa: E402

FILE = ROOT / "docs" / "reference" / "cli.md"
HEAD = f"""# Commands and their flags

Written by `python scripts/cli_reference.py` from the parsers; a test compares. `COMMAND --help` shows the same.

`python -m sharesd`, `python -m serve`, `python -m train` and `python -m benchmark` start the same programs.
Sizes: {SIZES}.
A flag without effect is one line of warning on stderr; a mistake is one line and status 2.
"""


class Row(NamedTuple):
    """A line of a table."""

    flag: str
    default: str
    meaning: str


class OptionGroup(NamedTuple):
    """Flags under one title."""

    title: str
    rows: tuple[Row, ...]

    @property
    def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """All but the defaults, which may differ from command to command."""
        return self.title, tuple((row.flag, row.meaning) for row in self.rows)


class Command(NamedTuple):
    """A command or subcommand that can be run."""

    name: str
    description: str
    groups: tuple[OptionGroup, ...]


def commands() -> list[Command]:
    """Every command that is no second name of another, in the order of `sharesd --help`."""
    programs = {
        **{name: _below(make_parser(NAME))[name] for name in ("generate", "chat", "cache")},
        "serve": serve_parser(f"{NAME} serve"),
        "train": train_parser(f"{NAME} train"),
        "bench": bench_parser(f"{NAME} bench"),
        **_below(program(NAME, "", "", ["benchmark.studies.tune", "benchmark.studies.verify"])),
    }
    return [command for name in COMMANDS if name in programs for command in _commands_of(programs[name])]


def page() -> str:
    """The whole page."""
    found = commands()
    groups = [group for command in found for group in command.groups]
    keys = list(dict.fromkeys(group.key for group in groups))
    shared = {key for key in keys if sum(group.key == key for group in groups) > 1 and len(key[1]) > 2}
    anchors: dict[tuple, str] = {}
    differing: set[tuple[tuple, str]] = set()
    sections: list[str] = []
    for key in keys:
        if key not in shared:
            continue
        users = [command for command in found if any(group.key == key for group in command.groups)]
        several = sum(other[0] == key[0] for other in shared) > 1
        title = f"Flags: {key[0]}" + (f" of {users[0].name.removeprefix(f'{NAME} ')}" if several else "")
        anchors[key] = _anchor(title)
        alike = [next(group for group in command.groups if group.key == key) for command in users]
        rows = list(alike[0].rows)
        for i, row in enumerate(rows):
            if len({group.rows[i].default for group in alike}) > 1:
                differing.add((key, row.flag))
                rows[i] = row._replace(default="by command")
        sections.append(f"## {title}\n\n{_table(rows)}")
    parts = [HEAD, "| command | does |\n| --- | --- |\n" + "\n".join(_summary(name) for name in COMMANDS)]
    parts += [_section(command, anchors, differing) for command in found]
    return "\n\n".join(part.strip() for part in (*parts, *sections)) + "\n"


def _summary(name: str) -> str:
    return f"| `{NAME} {name}` | {COMMANDS[name]} |"


def _section(command: Command, anchors: dict[tuple, str], differing: set[tuple[tuple, str]]) -> str:
    """Options of a command alone, links to shared ones, and defaults that differ from theirs."""
    own = [row for group in command.groups if group.key not in anchors for row in group.rows]
    linked = [group for group in command.groups if group.key in anchors]
    parts = [f"## {command.name}", command.description]
    if own:
        parts.append(_table(own))
    if linked:
        parts.append("And " + ", ".join(f"[{group.title}](#{anchors[group.key]})" for group in linked) + ".")
    own_defaults = [
        f"`{row.flag.strip('`').split()[0]}` {row.default or 'off'}"
        for group in linked
        for row in group.rows
        if (group.key, row.flag) in differing
    ]
    if own_defaults:
        parts.append(f"Defaults here: {', '.join(own_defaults)}.")
    return "\n\n".join(parts)


def _table(rows: list[Row]) -> str:
    lines = ["| flag | default | meaning |", "| --- | --- | --- |"]
    return "\n".join((*lines, *(f"| {row.flag} | {row.default} | {row.meaning} |" for row in rows)))


def _anchor(title: str) -> str:
    """The name that a heading has in links."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Subcommands by name."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def _commands_of(parser: argparse.ArgumentParser) -> Iterator[Command]:
    below = _below(parser)
    for each in below.values():
        yield from _commands_of(each)
    if not below:
        groups = [OptionGroup(group.title or "", tuple(_rows(group))) for group in parser._action_groups]
        named = tuple(group for group in groups if group.rows)
        yield Command(parser.prog, _cell(parser.description or ""), named)


def _rows(group: argparse._ArgumentGroup) -> Iterator[Row]:
    for action in group._group_actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        meaning = (action.help or "").replace("%%", "%")
        default = "required" if action.required and action.option_strings else _default(action.default)
        said = re.search(r" ?\(default: ([^()]*(?:\([^()]*\)[^()]*)*)\)$", meaning)
        if said:
            meaning, default = meaning[: said.start()], said[1]
        choices = "" if action.choices is None else " " + "\\|".join(map(str, action.choices))
        value = "" if action.nargs == 0 else choices or f" {action.metavar or action.dest.upper()}"
        flag = ", ".join(action.option_strings)
        yield Row(f"`{_cell(flag + value if flag else str(action.metavar))}`", _cell(default), _cell(meaning))


def _default(value: Any) -> str:
    if value is True:
        return "on"
    return "" if value is None or value is False or value in (argparse.SUPPRESS, "", []) else str(value)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(page(), encoding="utf-8")
    print(f"{FILE.relative_to(ROOT)}: {len(page().splitlines())} lines")
