"""`python -m benchmark gpu` runs its sections on a CPU too, and goes on after one that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark import gpu
from benchmark.__main__ import main


def test_sections_are_measured_and_failures_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "_bandwidth", lambda device: {"copy_bytes_per_second": 1e10})

    def fail(device: str) -> dict[str, Any]:
        raise RuntimeError("no start today")

    monkeypatch.setattr(gpu, "_starts", fail)
    args = ["gpu", "--device", "cpu", "--sizes", "135m", "--quants", "hqq:4:64,head=4", "--num-prompts", "1"]
    assert main([*args, "--max-new-tokens", "6", "--out-dir", "out"]) == 1
    found = json.loads(Path("out/gpu.json").read_text())["sections"]
    assert found["start"]["error"] == "RuntimeError: no start today"
    modes = found["135m hqq:4:64,head=4"]["modes"]
    assert set(modes) == {f"{mode} T={t}" for mode in ("naive", "share", "classic") for t in (0, 1)}
    assert all(figures["identical"] == 1 and figures["tokens_per_second"] > 0 for figures in modes.values())
    assert found["135m hqq:4:64,head=4"]["graphs_after_warm_up"] == 0
    report = Path("out/gpu.md").read_text()
    assert "| 135m | hqq:4:64,head=4 | share T=1 |" in report and "no start today" in report


def test_wrong_requests_are_refused(capsys: Any) -> None:
    assert main(["gpu", "--sizes", "3b"]) == 2
    assert "3b" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["gpu"]) == 2
        assert "finds no GPU" in capsys.readouterr().err
