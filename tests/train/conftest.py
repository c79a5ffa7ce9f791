"""What trainings of tests learn from. They draw no curves, which takes most of their time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_models import make_checkpoint


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.heads.metrics_log.MetricsLog.draw", lambda log: None)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of a tiny model; the model's folder is next to them. Tests must not write there."""
    folder = tmp_path_factory.mktemp("data")
    model = make_checkpoint(folder / "model", layers=4)
    (folder / "answers").mkdir()
    (folder / "answers" / "settings.json").write_text(json.dumps({"target": str(model)}))
    dice, lines = torch.Generator().manual_seed(0), ""
    for index in range(24):
        ids = torch.randint(300, (20 + index,), generator=dice).tolist()
        messages = [{"role": "user", "content": f"the cat {index}"}]
        sequence = {"token_ids": ids, "loss_spans": [[5, len(ids)]]}
        record = {"index": index, "sample": 0, "messages": messages, "sequences": [sequence]}
        lines += json.dumps(record) + "\n"
    (folder / "answers" / "answers-00000-of-00001.jsonl").write_text(lines)
    return folder
