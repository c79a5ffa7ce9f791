"""Search for a text's last tokens in a sorted corpus.

In Python it takes 1 % of a round.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_int64, c_void_p

import numpy as np
import torch

from compile.cpp_extension import kernel
from compile.op_registry import runs_cpp


def suffix_finder(
    backward: np.ndarray, order: np.ndarray, max_starts: int
) -> Callable[[Sequence[int]], tuple[int, list[int]]]:
    """Return a function that finds suffixes with the longest match.

    backward [N] >i4, order [N] >i4: starts of its suffixes, sorted. The function returns how many tokens match, and at
    most `max_starts` starts, spread evenly; -1 tokens if the order points outside the corpus.
    """
    assert backward.dtype == order.dtype == np.dtype(">i4") and len(backward) == len(order)
    assert backward.flags.c_contiguous and order.flags.c_contiguous
    if not runs_cpp(torch.device("cpu")):
        return _finder_in_python(backward, order, max_starts)
    function = kernel("find_suffixes", torch.int32, *[c_void_p] * 3, *[c_int64] * 3, c_void_p)
    places = [array.ctypes.data_as(c_void_p) for array in (backward, order)]  # which keep the arrays alive
    num = len(order)
    out = (c_int64 * (2 + max_starts))()

    def find_suffixes(wanted: Sequence[int]) -> tuple[int, list[int]]:
        function(*places, (c_int32 * len(wanted))(*wanted), len(wanted), num, max_starts, out)
        return out[0], out[2 : 2 + out[1]]

    return find_suffixes


def _finder_in_python(
    backward: np.ndarray, order: np.ndarray, max_starts: int
) -> Callable[[Sequence[int]], tuple[int, list[int]]]:
    num = len(order)

    def suffix(rank: int, length: int) -> list[int]:
        start = int(order[rank])
        return backward[max(start, 0) : max(start, 0) + length].tolist()

    def common(rank: int, wanted: list[int]) -> int:
        pairs = zip(suffix(rank, len(wanted)), wanted, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(suffix(rank, len(wanted))), len(wanted)))

    def find_suffixes(wanted: Sequence[int]) -> tuple[int, list[int]]:
        whole = list(wanted)
        near = bisect_left(range(num), whole, key=lambda rank: suffix(rank, len(whole)))
        matched = max((common(rank, whole) for rank in (near - 1, near) if 0 <= rank < num), default=0)
        if not matched:
            return 0, []
        first = bisect_left(range(num), whole[:matched], key=lambda rank: suffix(rank, matched))
        end = bisect_right(range(num), whole[:matched], key=lambda rank: suffix(rank, matched))
        count = min(max_starts, end - first)
        starts = [int(order[first + i * (end - first) // count]) for i in range(count)]
        return (-1 if any(start >= num for start in starts) else matched), starts

    return find_suffixes
