"""`python -m sharesd`."""

import sys
from collections.abc import Sequence

from sharesd.cli.process import guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Import and run the program."""
    from sharesd.cli.main import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(guarded(main))
