"""Command line of `train`, with a subcommand per task."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sharesd.cli.parser import program, run_command
from sharesd.cli.process import guarded

if TYPE_CHECKING:
    from sharesd.cli.parser import Parser

PROG = "python -m train"
COMMANDS = (
    "train.build_recycle_table",
    "train.build_corpus",
    "train.data.self_prompts",
    "train.data.generate",
    "train.data.inspect",
    "train.heads.command",
)


def make_parser(prog: str = PROG) -> Parser:
    """Return the parser; `prog` is the name of the program."""
    return program(prog, "Prepare drafters for a model, and their data.", "COMMAND", COMMANDS)


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command; returns the exit status."""
    return run_command(make_parser(prog), argv)


if __name__ == "__main__":
    sys.exit(guarded(main))
