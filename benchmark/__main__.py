"""`python -m benchmark`: what it can measure."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from sharesd.options import Parser, main_guard, parse

COMMANDS = (
    "benchmark.questions_command",
    "benchmark.peers",
    "benchmark.widen",
    "benchmark.exact",
    "benchmark.offline",
    "benchmark.gpu",
    "benchmark.scaling",
    "benchmark.calibrate",
    "benchmark.sweep",
)
"""Modules with `add_parser(subparsers)`, which sets the defaults `run` (args -> exit status) and `parser`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    parser = Parser(prog="python -m benchmark", description="Measure ShareSD.")
    subparsers = parser.add_subparsers(metavar="BENCHMARK", required=True)
    for name in COMMANDS:
        importlib.import_module(name).add_parser(subparsers)
    args = parse(parser, argv)
    return main_guard(lambda: args.run(args))


if __name__ == "__main__":
    sys.exit(main())
