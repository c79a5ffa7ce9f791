"""`python -m benchmark`: what it can measure."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sharesd.cli.options import run_command

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    return run_command("python -m benchmark", "Measure ShareSD.", "BENCHMARK", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
