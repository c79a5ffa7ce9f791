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
REMOVED = {  # removed command -> replacement
    "scaling": "use sweep --over width=1,2,4,8 --over context=128,2048",
    "offload": "use mtbench with --cpu-memory-limit or --gpu-memory-limit",
    "busy": "use sweep --over threads=1,2 beside the other process",
    "joins": "use serve, which reports the gaps between tokens",
    "multi": "use mtbench with --devices or --tensor-parallel",
    "cluster": "use serve --sweep on the machines themselves",
}
MOVED = {"exact": "verify", "calibrate": "tune"}  # names of commands of `sharesd` that remain here


def make_parser(prog: str = PROG) -> Parser:
    return program(prog, "Measure ShareSD.", "BENCHMARK", COMMANDS)


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one benchmark; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in REMOVED:
        print(f"error: the benchmark {argv[0]} was removed; {REMOVED[argv[0]]}", file=sys.stderr)
        return 2
    if argv and argv[0] in MOVED:
        return run_command(program(prog, "", "BENCHMARK", {f"benchmark.studies.{MOVED[argv[0]]}": argv[0]}), argv)
    return run_command(make_parser(prog), argv)


if __name__ == "__main__":
    sys.exit(guarded(main))
