"""Covering sets: few tests of a product, in which every pair of values occurs."""

from __future__ import annotations

from itertools import combinations, product

from tests.helpers.covering import covering


def test_every_pair_stays_and_few_do() -> None:
    points = list(product(range(5), "abc", range(8)))
    kept = [points[i] for i in covering(points, 2)]
    for one, other in combinations(range(3), 2):
        assert {(p[one], p[other]) for p in kept} == {(p[one], p[other]) for p in points}
    assert len(kept) <= 45 < len(points) == 120


def test_every_value_stays() -> None:
    points = list(product(range(4), range(11)))
    kept = [points[i] for i in covering(points, 1)]
    assert [{p[i] for p in kept} for i in (0, 1)] == [set(range(4)), set(range(11))] and len(kept) == 11
