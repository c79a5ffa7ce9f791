"""scripts/measures.py: its table, and what counts as imported."""

from __future__ import annotations

import pytest

from scripts import measures


@pytest.mark.subprocess
def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The engine is part of what a share run imports, and that is part of the project."""
    assert measures.main([]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    found = {name.strip(): [int(cell.replace(",", "")) for cell in cells] for name, *cells in rows}
    package, tests, share, engine = found.values()
    assert all(0 < alone < run for alone, run in zip(engine, share, strict=True))
    assert all(each[0] < each[1] for each in (package, tests))
