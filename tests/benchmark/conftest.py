"""What tests of benchmarks share: commands, and a world of their own for these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmark.__main__ import main


@pytest.fixture
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in a folder of the test's own, what they cache goes there too, logging stays as pytest set it up."""
    monkeypatch.chdir(tmp_path)
    for module in ("sharesd_files", "sharesd.runtime", "sharesd.weights.quantize"):
        monkeypatch.setattr(f"{module}.cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr("sharesd.cli.console.set_up_logging", lambda level: None)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*argv: str) -> tuple[int, str, str]:
        try:
            status = main(argv)
        except SystemExit as stop:
            assert isinstance(stop.code, int)
            status = stop.code
        return status, *capsys.readouterr()

    return run
