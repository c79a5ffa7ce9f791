"""Options shared by several benchmarks, and the types of their values."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")


def number(text: str, minimum: int = 1) -> int:
    """Return a whole number of at least `minimum` (an argparse type)."""
    if not text.isascii() or not text.isdigit() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} on")
    return int(text)


def add_questions(group: Any, num_questions: int, max_new_tokens: int) -> None:
    """Add the options of benchmarks on the first turns of questions."""
    group.add_argument("--questions", metavar="FILE", help="JSON Lines, gzipped or not (default: ShareSD's own)")
    count: dict[str, Any] = {"type": number, "metavar": "N"}
    group.add_argument("--num-questions", default=num_questions, help="first turns of N questions", **count)
    group.add_argument("--max-new-tokens", default=max_new_tokens, help="N tokens per answer at most", **count)


def add_out_dir(group: Any, name: str) -> None:
    group.add_argument("--out-dir", metavar="DIR", help=f"where the files go (default: results/{name}-DATE-TIME)")


def rotated(items: Sequence[_T], by: int) -> list[_T]:
    by %= len(items)
    return [*items[by:], *items[:by]]
