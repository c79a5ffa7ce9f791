"""Folders that tests name."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
HELPERS = Path(__file__).parent
