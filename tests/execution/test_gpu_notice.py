"""Whoever uses a GPU hears, once, that none has been tried."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from sharesd.config import EngineConfig
from sharesd.devices import selection as device
from sharesd.loading import resolve
from sharesd.runtime import Runtime
from tests.helpers.tiny_models import make_checkpoint

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def first_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(device, "_warned", False)
    caplog.set_level(logging.WARNING)


def test_one_warning_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    device.warn_untested(torch.device("cpu"))
    assert caplog.messages == []
    for _ in range(2):
        device.warn_untested(CUDA)
    assert caplog.messages == [device.UNTESTED] and "--device cpu" in device.UNTESTED


def test_none_once_a_gpu_was_tried(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "GPU_TESTED", True)
    device.warn_untested(CUDA)
    assert caplog.messages == []


def test_it_comes_before_the_model_is_loaded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Reached(Exception):
        pass

    def stop(*args: object, **options: object) -> None:
        raise Reached

    monkeypatch.setattr(resolve, "device_of", lambda name: torch.device("cpu") if name == "cpu" else CUDA)
    monkeypatch.setattr(resolve, "prepare_cuda", lambda steady: None)
    monkeypatch.setattr(resolve, "open_device", lambda device, auto: device)
    monkeypatch.setattr(resolve, "use", stop)
    config = EngineConfig(target=str(make_checkpoint(tmp_path / "model")), mode="naive")
    with pytest.raises(Reached):
        Runtime(config)
    assert caplog.messages == [device.UNTESTED]
