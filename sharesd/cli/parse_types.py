"""Parsers of flag values, with argparse's error for invalid values."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

from sharesd.startup import option_values
from sharesd.startup.option_values import DTYPES

__all__ = [
    "DTYPES",
    "SIZES",
    "distinct_names",
    "dtype",
    "names",
    "number",
    "parts_of",
    "shown",
    "size",
    "sizes_of_gpus",
    "tree",
    "whole",
    "whole_or_auto",
]

_T = TypeVar("_T")
SIZES = "G and GiB are 2^30 bytes, GB is 10^9; likewise K, M and T"


def size(text: str) -> int:
    """Return the bytes of a size such as 2G, 2GiB or 512m."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)(?:([KMGT])(I?B)?|B)", text.upper())
    if not parts:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; use for example 512M, 8GB or 8GiB")
    power = " KMGT".index(parts[2] or " ")
    return int(float(parts[1]) * (1000 if parts[3] == "B" else 1024) ** power)


def sizes_of_gpus(text: str) -> tuple[tuple[int, int], ...]:
    """Return GPU numbers and bytes of a list such as 0=10GB,1=20GB."""
    sizes: dict[int, int] = {}
    for part in text.split(","):
        number, _, amount = part.strip().partition("=")
        if not number.isdecimal() or int(number) in sizes:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of GPUs and sizes; use for example 0=10GB,1=20GB")
        sizes[int(number)] = size(amount)
    return tuple(sizes.items())


def whole(text: str) -> int:
    return int(_checked(int, text, "a whole number"))


def number(text: str) -> float:
    return _checked(float, text, "a number")


def whole_or_auto(text: str) -> int | str:
    return text if text == "auto" else whole(text)


def shown(convert: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return the same parser, with ValueError replaced by argparse's error."""

    def parse(text: str) -> _T:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def distinct_names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names(text) if name))


tree, dtype, names = shown(option_values.tree), shown(option_values.dtype), option_values.names


def _checked(convert: Callable[[str], float], text: str, kind: str) -> float:
    try:
        value = convert(text)
        finite = math.isfinite(value)
    except (ValueError, OverflowError):
        finite = False
    if not finite:
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
    return value


def parts_of(name: str, text: str) -> tuple[str, ...]:
    """Return distinct parts of a comma-separated list; ValueError for an empty part."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"{name} is {text!r}, which has an empty part; separate the parts with ','")
    return tuple(dict.fromkeys(parts))
