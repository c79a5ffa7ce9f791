"""Damaged files end in right weights or in an error of one line that names a file, in bounded memory and time.

The damage of a number is always the same. To see one again:
`python -m tests.helpers.damage_worker KIND NUMBER NUMBER+1 EMPTY_FOLDER`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.damage_runner import KINDS, load_all, load_few, table, wrong

FIRST = {"weights": 4, "tokenizer": 12, "heads": 8}
"""Numbers from which eight files have both outcomes; else 0."""


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return load_few(FIRST, 8)


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize("kind", KINDS)
def test_damage(kind: str, outcomes: list[dict[str, Any]]) -> None:
    records = [record for record in outcomes if record["kind"] == kind]
    assert wrong(records) == []
    assert [record["number"] for record in records] == [FIRST.get(kind, 0) + i for i in range(8)]
    assert {record["outcome"] for record in records} == {"loaded", "refused"}


@pytest.mark.long
@pytest.mark.subprocess
def test_ten_thousand_files() -> None:
    records = load_all(1430)
    print(table(records))
    assert wrong(records) == []
