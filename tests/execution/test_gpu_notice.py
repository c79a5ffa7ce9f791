"""Whoever uses a GPU hears, once, that none has been tried."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from sharesd import runtime
from sharesd.config import EngineConfig
from sharesd.devices import selection as device
from tests.helpers.tiny_models import make_checkpoint

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def first_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(device, "_warned", False)
    caplog.set_level(logging.WARNING)


def test_one_warning_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    device.warn_untried(torch.device("cpu"))
    assert caplog.messages == []
    for _ in range(2):
        device.warn_untried(CUDA)
    assert caplog.messages == [device.UNTRIED] and "--device cpu" in device.UNTRIED


def test_none_once_a_gpu_was_tried(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "GPU_TRIED", True)
    device.warn_untried(CUDA)
    assert caplog.messages == []


def test_it_comes_before_the_model_is_loaded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Reached(Exception):
        pass

    def stop(*args: object, **options: object) -> None:
        raise Reached

    monkeypatch.setattr(runtime, "device_of", lambda name: torch.device("cpu") if name == "cpu" else CUDA)
    monkeypatch.setattr(runtime, "prepare_cuda", lambda steady: None)
    monkeypatch.setattr(runtime, "opened", lambda device, auto: device)
    monkeypatch.setattr(runtime, "use", stop)
    config = EngineConfig(target=str(make_checkpoint(tmp_path / "model")), mode="naive")
    with pytest.raises(Reached):
        runtime.Runtime(config)
    assert caplog.messages == [device.UNTRIED]
