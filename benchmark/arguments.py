"""What the measuring commands read from their command lines in the same way."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

_T = TypeVar("_T")


def numbers(text: str) -> tuple[int, ...]:
    """A type of argparse: whole numbers from 1 on with commas, in ascending order, each once."""
    try:
        found = tuple(sorted(set(map(int, text.split(",")))))
    except ValueError:
        found = ()
    if not found or found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers from 1 on, such as 1,2,4")
    return found


def number(text: str) -> int:
    """A type of argparse: a whole number from 1 on."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def add_out_dir(group: Any, name: str) -> None:
    """`--out-dir`, for the files of the command `name`. Read it with `out_folder`."""
    group.add_argument("--out-dir", metavar="DIR", help=f"where the files go (default: results/{name}-DATE-TIME)")


def out_folder(text: str | None, name: str) -> Path:
    """Where to write, known to be possible before anything is measured."""
    folder = Path(text) if text is not None else Path("results") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out-dir {folder} cannot be made ({error.strerror}); name another folder") from error
    return folder


def command() -> str:
    """The command line, as one would type it."""
    console = Path(sys.argv[0]).stem in ("sharesd", "sharesd_command")
    return shlex.join([*(["sharesd"] if console else ["python", "-m", "benchmark"]), *sys.argv[1:]])


def rich_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    """A table for the terminal; the first `left` columns hold names, which may wrap, the others figures."""
    table = Table(title=title, box=None, title_justify="left", header_style="")
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=i >= left)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The same as a table of Markdown."""
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def each(name: str, convert: Callable[[str], _T], text: str, separator: str = ",") -> tuple[_T, ...]:
    """The parts of a list, converted, each once; ValueError, with the name of the option, for an empty part."""
    parts = [part.strip() for part in text.split(separator)]
    if not all(parts):
        raise ValueError(f"{name} is {text!r}, which has an empty part; write the parts with {separator!r} between")
    return tuple(dict.fromkeys(map(convert, parts)))
