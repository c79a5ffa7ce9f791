"""`python -m train`: what can be prepared."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sharesd.cli.options import run_command

COMMANDS = ("train.table", "train.corpus", "train.prompts", "train.generate", "train.inspect", "train.heads.command")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    return run_command("python -m train", "Prepare drafters for a model, and their data.", "COMMAND", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
