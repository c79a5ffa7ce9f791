"""The scaling benchmark on a tiny model: what is timed, what must move, and mistakes on the command line."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch

from benchmark.__main__ import main
from benchmark.studies import scaling
from benchmark.studies.scaling import Bandwidth, Figure, Point, cost_ratios, kv_bytes, points_of, weight_bytes
from quant.config import QuantConfig
from sharesd.config import EngineConfig
from sharesd.runtime import Runtime
from tests.helpers.tiny_models import make_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bandwidth.__init__, "__defaults__", (2**20,))


LISTS = ("--contexts", "16,64", "--widths", "1,4", "--batches", "1,2", "--repeats", "3")


@pytest.mark.parametrize("compiled", ["native", "off"])
def test_all_axes_are_measured_and_written(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], compiled: str
) -> None:
    out = tmp_path / "out"
    options = ["--target", str(tiny), "--compile", compiled, "--out-dir", str(out)]
    assert main(["scaling", *LISTS, *options]) == 0
    report = json.loads((out / "scaling.json").read_text())
    seen = [tuple(step[name] for name in ("axis", "part", "context", "width", "batch")) for step in report["steps"]]
    assert seen == [
        ("context", "target", 16, 1, 1),
        ("context", "draft", 16, 1, 1),
        ("context", "target", 64, 1, 1),
        ("context", "draft", 64, 1, 1),
        ("width", "target", 16, 1, 1),
        ("width", "target", 16, 4, 1),
        ("batch", "target", 16, 1, 1),
        ("batch", "target", 16, 1, 2),
    ]
    for step in report["steps"]:
        assert 0 < step["min_ms"] <= step["median_ms"] and step["step_rows"] == step["width"]
        floor = 1e3 * (step["weight_bytes"] + step["kv_bytes"]) / report["bandwidth_bytes_per_s"]
        assert step["floor_ms"] == pytest.approx(floor)
        assert step["times_floor"] > 0
        # 2 layers, 2 key/value heads of 16, keys and values of 2 bytes
        assert step["kv_bytes"] == step["batch"] * step["context"] * 2 * 2 * 16 * 2 * 2
    assert report["cost_ratio_c"].keys() == {"16", "64"} and report["environment"]["torch"] == metadata.version("torch")
    assert sorted(path.name for path in out.iterdir()) == ["scaling.json", "scaling.md"]
    page, shown = (out / "scaling.md").read_text(), capsys.readouterr().out
    for head in ("| part | context |", "| part | width |", "| part | batch |"):
        assert head in page
    assert "| draft | 64 |" in page and "steps by batch (context 16, width 1)" in shown


def test_weights_that_a_step_reads(tiny: Path) -> None:
    config = EngineConfig(target=str(tiny), max_context=64, quant=QuantConfig.parse("hqq:4:64"))
    target = Runtime(config, ("share",)).target
    assert isinstance(target, torch.nn.Module)
    linears = 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128)  # of both blocks
    rest = 2 * (384 * 64 + 5 * 64)  # the head and the norms, in bfloat16
    assert weight_bytes(target, low=False) == 2 * linears + rest
    groups = linears // 64  # with a scale and an offset of two bytes each
    assert weight_bytes(target, low=True) == linears // 2 + 4 * groups + rest


def test_a_window_bounds_the_live_slots(tiny: Path) -> None:
    target = Runtime(EngineConfig(target=str(tiny), mode="naive", max_context=64)).target
    point = Point(axis="context", part="target", context=48, width=4, batch=1)
    cache = target.new_cache(1, 64)
    full = kv_bytes(target, cache, point)
    config = target.config  # type: ignore[attr-defined]
    object.__setattr__(config, "layers", (config.layers[0]._replace(window=21), config.layers[1]))
    assert kv_bytes(target, cache, point) == full // 2 + full // 4


def test_points_stand_at_the_first_value_of_the_other_axes() -> None:
    points = list(points_of((128, 256), (2, 4), (3,)))
    assert [p.width for p in points if p.part == "draft"] == [1, 1]
    assert {(p.context, p.batch) for p in points if p.axis == "width"} == {(128, 3)}


def figure(part: str, context: int, width: int, median_ms: float) -> Figure:
    point = Point(axis="context", part=part, context=context, width=width, batch=1)
    times = {"median_ms": median_ms, "min_ms": median_ms, "floor_ms": 1.0, "times_floor": median_ms}
    return Figure(point=point, step_rows=width, weight_bytes=1, kv_bytes=1, **times)


def test_cost_ratios_are_of_plain_steps() -> None:
    assert cost_ratios([figure("target", 128, 1, 8.0), figure("draft", 128, 1, 2.0)]) == {128: 0.25}
    assert cost_ratios([figure("target", 128, 2, 8.0), figure("draft", 128, 1, 2.0)]) == {}


def test_the_bandwidth_is_that_of_a_large_buffer() -> None:
    assert scaling.BUFFER_BYTES >= 256e6
    assert Bandwidth(torch.device("cpu"), 2**22).sample() > 1e6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--contexts", "128,1024"), "--contexts goes to 1024 and the model's context is 512 tokens; drop"),
        (("--contexts", "16,64", "--widths", "1,32"), "--contexts begins with 16 and a step has up to 32 rows"),
        (("--contexts", "64", "--widths", "1", "--max-context", "32"), "--max-context is 32 and --contexts goes to 64"),
    ],
)
def test_mistakes_cost_a_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], says: str
) -> None:
    assert main(["scaling", "--target", str(tiny), "--out-dir", str(tmp_path / "out"), *options]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "0", "1,x", "-1,2"])
def test_lists_hold_whole_numbers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["scaling", f"--widths={text}"])
    assert caught.value.code == 2 and "is not a list of whole numbers" in capsys.readouterr().err
