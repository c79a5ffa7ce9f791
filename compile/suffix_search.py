"""Search for a text's last tokens in a sorted corpus.

In Python it takes 1 % of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int32, c_int64, c_void_p

import numpy as np
import torch

from compile.cpp_extension import kernel


def suffix_finder(
    backward: np.ndarray, order: np.ndarray, max_starts: int
) -> Callable[[Sequence[int]], tuple[int, list[int]]]:
    """Return a function that finds suffixes with the longest match.

    backward [N] >i4, order [N] >i4: starts of its suffixes, sorted. The function returns how many tokens match, and at
    most `max_starts` starts, spread evenly; -1 tokens if the order points outside the corpus.
    """
    assert backward.dtype == order.dtype == np.dtype(">i4") and len(backward) == len(order)
    assert backward.flags.c_contiguous and order.flags.c_contiguous
    function = kernel("find_suffixes", torch.int32, *[c_void_p] * 3, *[c_int64] * 3, c_void_p)
    places = [array.ctypes.data_as(c_void_p) for array in (backward, order)]  # which keep the arrays alive
    num = len(order)
    out = (c_int64 * (2 + max_starts))()

    def find_suffixes(wanted: Sequence[int]) -> tuple[int, list[int]]:
        function(*places, (c_int32 * len(wanted))(*wanted), len(wanted), num, max_starts, out)
        return out[0], out[2 : 2 + out[1]]

    return find_suffixes
