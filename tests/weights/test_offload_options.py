"""The options of offloading, and the plan that is printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serve.command import main as serve
from sharesd.cli.main import main
from sharesd.cli.options import Parser, add_model_options, engine_config, parse
from sharesd.config import EngineConfig, OffloadConfig
from sharesd.weights import offload_planner

GB = 10**9


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_planner, "_disk_rate", lambda *args: 1e6)


def config_of(*argv: str) -> EngineConfig:
    parser = Parser()
    add_model_options(parser)
    return engine_config(parse(parser, argv), modes=("share",))


@pytest.mark.parametrize("text", ["8", "GB", "8 G", "8iB", "-8GB", "1e3GB", "8GBGB", "infGB"])
def test_sizes_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of(f"--cpu-memory-limit={text}")
    assert "is not a size; use for example 512M, 8GB or 8GiB" in capsys.readouterr().err


def test_the_plan_chooses_what_nobody_gave() -> None:
    assert config_of().offload == OffloadConfig()
    given = config_of("--draft-quant", "hqq:4:64,head=4", "--max-speculative-tokens", "8", "--offload-dir", "here")
    assert given.offload == OffloadConfig(folder="here", choose_bits=False, choose_depth=False)
    assert (given.quant, given.max_draft) == (EngineConfig().quant, EngineConfig().max_draft)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--offload", "off", "--cpu-memory-limit", "1GB"), "offload is off, and a limit or a folder for it is given"),
        (("--cpu-memory-limit", "1MB"), "the model does not fit, even with all blocks offloaded"),
    ],
)
def test_mistakes_cost_one_line(args: tuple[str, ...], message: str, checkpoint: Any, capsys: Any) -> None:
    assert main(["generate", "hello", "--target", str(checkpoint()), "--device", "cpu", *args]) == 2
    assert message in (err := capsys.readouterr().err) and err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        ({"device_memory": GB}, "--gpu-memory-limit: no effect on a CPU"),
        ({"folder": "here"}, "--offload-dir: no effect, the whole model is resident"),
        ({"folder": "here", "host_memory": 50 * GB}, "--offload-dir: no effect"),
    ],
)
def test_limits_without_effect_are_a_warning(given: dict[str, Any], warning: str, checkpoint: Any, caplog: Any) -> None:
    config = EngineConfig(target=str(checkpoint()), device="cpu", offload=OffloadConfig(**given))
    found = offload_planner.plan_for(config, ("naive",))
    assert found is None or not found.plan.offloads
    assert [record.message for record in caplog.records if warning in record.message]


@pytest.mark.parametrize("program", [lambda *args: main(["generate", "hello", *args]), lambda *args: serve(args)])
def test_a_plan_alone(program: Callable[..., int], checkpoint: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sharesd.startup.target.load_model", None)  # not called
    assert program("--target", str(checkpoint()), "--device", "cpu", "--offload", "plan-only") == 0
    out = capsys.readouterr().out
    assert out.startswith("plan") and "2 of 2 blocks" in out and "tok/s" in out
