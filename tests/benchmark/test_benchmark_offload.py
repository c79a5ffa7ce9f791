"""The benchmark of models that do not fit, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.__main__ import main
from benchmark.studies import offload
from tests.helpers.tiny_models import make_checkpoint


@pytest.mark.usefixtures("own_cache")
def test_what_does_not_fit_travels_and_texts_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offload, "in_a_process", offload.measure)
    monkeypatch.setattr("sharesd.weights.memory_estimate.own_memory", lambda: 0)  # of the tests
    monkeypatch.setattr("sharesd.weights.memory_estimate.RUNTIME_BYTES", 0)
    monkeypatch.setattr("offload.planner.IN_FLIGHT", 1)  # two slots, for blocks of 1.2 MB
    target = str(make_checkpoint(tmp_path / "model", hidden=256, layers=12, context=1024))
    out = tmp_path / "out"
    limits = ["--memory", "0.018,0.05", "--link", "0.5", "--bits", "4,8"]
    sizes = ["--num-questions", "1", "--max-new-tokens", "12", "--max-context", "512"]
    assert main(["offload", "--target", target, "--out-dir", str(out), *limits, *sizes]) == 0
    report = json.loads((out / "offload.json").read_text())
    assert {path.name for path in out.iterdir()} == {"offload.json", "offload.md", "offload.png"}
    assert [each["drafter"] for each in report["figures"]] == ["naive", "share, 4 bits", "share, 8 bits"] * 2
    tight, wide = report["figures"][:3], report["figures"][3:]
    texts = [each["texts"] for each in report["figures"]]
    assert all(each == texts[0] for each in texts) and len(texts[0][0]) == 12
    assert all(each["tokens_per_second"] > 0 and each["predicted"] > 0 for each in report["figures"])
    assert all(each["bytes_per_token"] > 0 and each["resident"] < 1 for each in tight)
    assert all(each["bytes_per_token"] == 0 and each["resident"] == 1 for each in wide)
    assert "link 0.5 GB/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--link", "0"], "give a number above 0"),
        (["--memory", "1,-2"], "give a number above 0"),
        (["--cpu-memory-limit", "1GB"], "--memory has several; drop them"),
    ],
)
def test_mistakes_cost_a_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["offload", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
