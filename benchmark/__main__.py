"""`python -m benchmark`: what it can measure."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sharesd.options import run_command

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
    "benchmark.grid",
    "benchmark.busy",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    return run_command("python -m benchmark", "Measure ShareSD.", "BENCHMARK", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
