"""Fixtures of tests that convert or quantize checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of one test."""
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized linears are read in several pieces."""
    monkeypatch.setattr("sharesd.models.quantized.layout._CHUNK_WEIGHTS", 1 << 12)
