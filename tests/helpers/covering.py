"""Covering sets: of a product of parameters, tests that see every pair of values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations

import pytest

FEW = 6
"""Products of so many tests stay whole."""
Point = tuple[Hashable, ...]


def thin(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests that a covering set leaves out.

    Of functions with more than `FEW` tests: where three or more `parametrize` make up a product, all pairs of values
    stay; where it is two, and the test is marked `thin`, every value stays.
    """
    by_function = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            by_function[item.nodeid.partition("[")[0]].append(item)
    left_out: list[pytest.Item] = []
    for tests in by_function.values():
        if len(tests) <= FEW:
            continue
        points = [_point(test) for test in tests]
        pairs = len(points[0]) > 2
        if pairs or (len(points[0]) == 2 and tests[0].get_closest_marker("thin")):
            kept = covering(points, 2 if pairs else 1)
            left_out += [test for i, test in enumerate(tests) if i not in kept]
    return left_out


def _point(test: pytest.Function) -> Point:
    """The values of a test by `parametrize`, then of fixtures that have parameters."""
    params = dict(test.callspec.params)
    axes: list[Hashable] = []
    for mark in test.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], (list, tuple)) else mark.args[0].split(",")
        axes.append(tuple(id(params.pop(name.strip(), None)) for name in names))
    return (*axes, *map(id, params.values()))


def covering(points: Sequence[Point], strength: int) -> set[int]:
    """Indices of points in which every tuple of `strength` coordinates occurs that occurs at all; greedily, few."""
    tuples = [frozenset(combinations(enumerate(point), strength)) for point in points]
    missing = set().union(*tuples)
    best = [(-len(each), i) for i, each in enumerate(tuples)]  # what points add at most: it only becomes less
    heapify(best)
    kept: set[int] = set()
    while missing:
        known, i = heappop(best)
        adds = -len(tuples[i] & missing)
        if adds > known:
            heappush(best, (adds, i))
        else:
            kept.add(i)
            missing -= tuples[i]
    return kept
