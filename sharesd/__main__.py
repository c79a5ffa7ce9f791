"""`python -m sharesd`."""

import sys

from sharesd.cli.process import guarded


def _main() -> int:
    from sharesd.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(guarded(_main))
