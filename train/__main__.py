"""`python -m train`: what can be prepared."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from sharesd.options import Parser, main_guard, parse

COMMANDS = ("train.table", "train.corpus")
"""Modules with `add_parser(subparsers)`, which sets the defaults `run` (args -> exit status) and `parser`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare one drafter; returns the exit status."""
    parser = Parser(prog="python -m train", description="Prepare drafters for a model.")
    subparsers = parser.add_subparsers(metavar="DRAFTER", required=True)
    for name in COMMANDS:
        importlib.import_module(name).add_parser(subparsers)
    args = parse(parser, argv)
    return main_guard(lambda: args.run(args))


if __name__ == "__main__":
    sys.exit(main())
