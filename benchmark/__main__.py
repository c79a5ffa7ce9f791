"""Everything that can be measured, as subcommands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sharesd.cli.parser import Parser, program, run_command

PROG = "python -m benchmark"
COMMANDS = (
    "benchmark.questions.command",
    "benchmark.peers",
    "benchmark.serve",
    "benchmark.studies.widen",
    "benchmark.studies.exact",
    "benchmark.studies.offline",
    "benchmark.gpu",
    "benchmark.studies.scaling",
    "benchmark.studies.calibrate",
    "benchmark.studies.sweep",
    "benchmark.studies.grid",
    "benchmark.studies.busy",
    "benchmark.studies.joins",
    "benchmark.studies.offload",
    "benchmark.studies.cluster",
    "benchmark.studies.multi",
)


def make_parser(prog: str = PROG) -> Parser:
    """The parser; `prog` is what the program was started as."""
    return program(prog, "Measure ShareSD.", "BENCHMARK", COMMANDS)


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one benchmark; returns the exit status."""
    return run_command(make_parser(prog), argv)


if __name__ == "__main__":
    sys.exit(main())
