"""The options of offloading, and the plan that is printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from serve.command import main as serve
from sharesd import planning
from sharesd.cli.main import main
from sharesd.cli.options import Parser, add_model_options, engine_config, parse
from sharesd.config import EngineConfig, OffloadConfig
from tests.helpers.tiny import make_checkpoint

GB = 10**9


def config_of(*argv: str) -> EngineConfig:
    parser = Parser()
    add_model_options(parser)
    return engine_config(parse(parser, argv), modes=("share",))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("8GB", 8 * GB), ("1.5GB", 3 * GB // 2), ("8GiB", 2**33), ("512MiB", 2**29), ("2TB", 2000 * GB)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert config_of("--host-memory", text).offload.host_memory == num_bytes
    assert config_of("--device-memory", text).offload.device_memory == num_bytes


@pytest.mark.parametrize("text", ["8", "GB", "8 G", "8gb", "-8GB", "1e3GB", "8GBGB", "infGB"])
def test_sizes_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of(f"--host-memory={text}")
    assert "for example 8GB or 8GiB" in capsys.readouterr().err


def test_the_plan_chooses_what_nobody_gave() -> None:
    assert config_of().offload == OffloadConfig()
    given = config_of("--quant", "hqq:4:64,head=4", "--max-draft", "8", "--offload-dir", "here")
    assert given.offload == OffloadConfig(folder="here", choose_bits=False, choose_depth=False)
    assert (given.quant, given.max_draft) == (EngineConfig().quant, EngineConfig().max_draft)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--offload", "off", "--host-memory", "1GB"), "offload is off, and a limit or a folder for it is given"),
        (("--device-memory", "1GB"), "--device-memory has no effect on a CPU"),
        (("--offload-dir", "here"), "--offload-dir has no effect: all of the model stays in memory"),
        (("--offload-dir", "here", "--host-memory", "50GB"), "--offload-dir has no effect"),
        (("--host-memory", "1MB"), "the model does not fit, even with all blocks travelling"),
    ],
)
def test_mistakes_cost_one_line(
    args: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path / "tiny")
    assert main(["generate", "hello", "--target", str(folder), "--device", "cpu", *args]) == 2
    assert message in (err := capsys.readouterr().err) and err.count("\n") == 1


@pytest.mark.parametrize("program", [lambda *args: main(["generate", "hello", *args]), lambda *args: serve(args)])
def test_a_plan_alone(
    program: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_disk_rate", lambda *args: 1e6)
    folder = make_checkpoint(tmp_path / "tiny")
    monkeypatch.setattr("sharesd.load.load_model", None)  # not called
    assert program("--target", str(folder), "--device", "cpu", "--offload", "plan-only") == 0
    out = capsys.readouterr().out
    assert out.startswith("plan") and "2 of 2 blocks" in out and "tok/s" in out
