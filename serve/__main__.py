"""The server as a program."""

import sys

from serve.command import main

if __name__ == "__main__":
    sys.exit(main())
