"""Entry point of `python -m serve`."""

import sys

from serve.command import main

if __name__ == "__main__":
    sys.exit(main())
