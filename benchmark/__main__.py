"""Benchmarks as subcommands: `sharesd bench NAME`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sharesd.cli.parser import Parser, program, run_command
from sharesd.cli.process import guarded

PROG = "python -m benchmark"
COMMANDS = (
    "benchmark.questions.command",
    "benchmark.sweep",
    "benchmark.peers.command",
    "benchmark.serve.command",
    "benchmark.gpu.command",
    "benchmark.offline",
    "benchmark.compare",
    "benchmark.studies.widen",
    "benchmark.studies.check_drafter",
)


def make_parser(prog: str = PROG) -> Parser:
    return program(prog, "Measure ShareSD.", "BENCHMARK", COMMANDS)


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one benchmark; returns the exit status."""
    return run_command(make_parser(prog), argv)


if __name__ == "__main__":
    sys.exit(guarded(main))
