"""Damaged files end in right weights or in an error of one line that names a file, in bounded memory and time.

The damage of a number is always the same. To see one again:
`python -m tests.helpers.damage_worker KIND NUMBER NUMBER+1 EMPTY_FOLDER`.
"""

from __future__ import annotations

import pytest

from tests.helpers.damage_runner import KINDS, load_all, load_damaged, table, wrong


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize("kind", KINDS)
def test_damage(kind: str) -> None:
    records = load_damaged(kind, 0, 10)
    assert wrong(records) == []
    assert {record["outcome"] for record in records} == {"loaded", "refused"}


@pytest.mark.long
@pytest.mark.subprocess
def test_ten_thousand_files() -> None:
    records = load_all(1430)
    print(table(records))
    assert wrong(records) == []
