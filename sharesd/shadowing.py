"""Files that Python finds in place of ShareSD's own top-level packages, because they bear the same names."""

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
    """ImportError where another file hides one of these packages; a program of ShareSD's ends, with one line."""
    error = hidden(packages)
    if error is None:
        return
    if _is_program():
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(error)


def hidden(packages: Sequence[str]) -> str | None:
    """The file that hides one of these packages and the remedy; None where Python finds ShareSD's. Imports nothing."""
    for name in packages:
        found = _found(name)
        if found is not None and os.path.realpath(os.path.dirname(found)) != ROOT:
            remedy = "rename it, or run from another folder"
            return f"{found} hides the package {name} of ShareSD, which is in {ROOT}; {remedy}"
    return None


def _found(name: str) -> str | None:
    """The file or package folder that `import name` takes; None where there is none, or it cannot be told."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return next(iter(spec.submodule_search_locations))
    return spec.origin


def _is_program() -> bool:
    """True in `python -m` with a package of ShareSD, and in the command `sharesd`."""
    program = sys.argv[0] if sys.argv else ""
    file = os.path.realpath(program)
    mains = [os.path.join(ROOT, name, "__main__.py") for name in PROGRAMS]
    return program == "-m" or file in mains or os.path.splitext(os.path.basename(file))[0] == "sharesd"
