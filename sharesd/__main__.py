"""`python -m sharesd`."""

import sys

from sharesd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
