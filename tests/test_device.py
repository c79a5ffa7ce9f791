"""Launches that name no GPU go to the one that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import new_engine, tiny_decoder
from tiny import make_checkpoint

from sharesd import device
from sharesd.config import EngineConfig, SamplingParams
from sharesd.load import Runtime


def test_the_gpu_that_was_asked_for_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cpu", "cuda", "cuda:3"):
        device.use(torch.device(name))
    assert current == [torch.device("cuda:3")], "without a number it is the current one already"


def test_loading_and_every_call_make_it_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    for module in ("load", "engine"):
        monkeypatch.setattr(f"sharesd.{module}.use", used.append)
    checkpoint = str(make_checkpoint(tmp_path / "model"))
    Runtime(EngineConfig(target=checkpoint, device="cpu", compile="off", max_context=64), ("naive",))
    assert used == [torch.device("cpu")]
    new_engine(tiny_decoder(0)).complete([[1]], SamplingParams(max_new_tokens=2))
    assert len(used) == 2, "the calling thread may be another one"
