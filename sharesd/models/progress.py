"""How long jobs tell that they move: a plain callback, so that models need no display."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""


def silent(what: str, done: int, total: int) -> None:
    """Report to nobody."""
