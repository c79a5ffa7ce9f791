"""Entry point of `python -m serve`."""

import sys

from sharesd.cli.process import guarded


def _main() -> int:
    from serve.command import main

    return main()


if __name__ == "__main__":
    sys.exit(guarded(_main))
