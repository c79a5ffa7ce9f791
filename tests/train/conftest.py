"""Trainings of tests draw no curves, which takes most of their time."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.heads.metrics_log.MetricsLog.draw", lambda log: None)
