"""When the shared drafter's weights are packed for drafts of one row: one copy, so the widest draft decides."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quant.config import QuantConfig
from sharesd.startup import streams
from sharesd.startup.streams import SharedDrafts, choose_streams, obstacle
from tests.startup.test_resolve import GPU, folder, resolved

__all__ = ["folder"]


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """A card of 8.0; what is in the list is why the kernel does not run there."""
    why_not: list[str | None] = [None]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(streams, "problem", lambda device, group: why_not[0])
    return why_not


def on_gpu(folder: Path, mode: str = "share", dtype: torch.dtype = torch.bfloat16, **options: Any) -> SharedDrafts:
    chosen = replace(resolved(folder, mode, tree="off", **options), device=GPU, dtype=dtype, compile="regional")
    return chosen.shared_drafts


def test_chains_of_one_request_are_streams(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, streams.log.name)
    for quant in ("hqq:4:64,head=4", "hqq:3:32", "hqq:8:64,down=4"):
        assert choose_streams(on_gpu(folder, quant=QuantConfig.parse(quant)), by_name=True) == "streams"
    assert caplog.messages == ["drafts: 4 bits as streams"] * 3


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"mode": "suffix"}, "no drafter of these modes shares the target's weights"),
        ({"quant": QuantConfig.parse("hqq:8:64")}, "draft_quant is hqq:8:64, which has no weights of 4 bits or fewer"),
        ({"quant": QuantConfig.parse("hqq:4:256")}, "draft_quant has groups of 256, and they take 32, 64, 128"),
        ({"max_batch": 4}, r"drafts have up to 4 rows \(max_batch 4\), and they are for one"),
        ({"dtype": torch.float16}, "dtype is float16, and they take bfloat16"),
    ],
)
def test_what_is_no_stream_is_tiled(
    folder: Path, given: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, streams.log.name)
    asked = on_gpu(folder, **given)
    assert choose_streams(asked, by_name=False) == "triton"
    with pytest.raises(ValueError, match=f"kernels is 'streams', and {reason}.*; use --kernels triton"):
        choose_streams(asked, by_name=True)
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_trees_and_old_cards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = replace(on_gpu(folder), tree=(3, 4, 8))
    assert "drafts have up to 3 rows (max_batch 1, tree 3:4:8)" in str(obstacle(wide))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert obstacle(on_gpu(folder)) == "the GPU is older than compute capability 8.0"


def test_a_kernel_that_does_not_run_is_told_once(
    folder: Path, card: list[str | None], caplog: pytest.LogCaptureFixture
) -> None:
    card[0] = "NVRTC is not installed"
    assert choose_streams(on_gpu(folder), by_name=False) == "triton"
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "does not run on cuda:0: NVRTC is not installed" in record.message
    with pytest.raises(ValueError, match="NVRTC is not installed; use --kernels triton"):
        choose_streams(on_gpu(folder), by_name=True)
