"""Detection of files that hide ShareSD's top-level packages.

Python imports such files instead, since they have the same names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

ROOT = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))
LOWER = ("compile", "quant", "offload", "multigpu")
"""Packages that sharesd imports."""
PROGRAMS = ("sharesd", "serve", "train", "benchmark")
"""Packages that `python -m` runs."""


def check(packages: Sequence[str]) -> None:
    """Raise ImportError if another file hides one of these packages.

    A program of ShareSD prints one line and exits instead.
    """
    error = hidden(packages)
    if error is None:
        return
    if is_program():
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(error)


def hidden(packages: Sequence[str]) -> str | None:
    """Return a message with the hiding file and the remedy.

    None if Python finds ShareSD's packages. Imports nothing.
    """
    for name in packages:
        found = _found(name)
        if found is not None and os.path.realpath(os.path.dirname(found)) != ROOT:
            remedy = "rename it, or run from another folder"
            return f"{found} hides the package {name} of ShareSD, which is in {ROOT}; {remedy}"
    return None


def _found(name: str) -> str | None:
    """Return the file or package folder that `import name` finds.

    None if there is none, or if the search fails.
    """
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return next(iter(spec.submodule_search_locations))
    return spec.origin


def is_program() -> bool:
    """True in a program of ShareSD.

    That is `python -m` with one of its packages, or the command `sharesd`.
    """
    program = sys.argv[0] if sys.argv else ""
    file = os.path.realpath(program)
    mains = [os.path.join(ROOT, name, "__main__.py") for name in PROGRAMS]
    return (
        program == "-m"
        or file in mains
        or os.path.splitext(os.path.basename(file))[0] in ("sharesd", "sharesd_command")
    )
