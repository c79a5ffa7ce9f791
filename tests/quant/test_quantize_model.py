"""Models whose linears are quantized, and solutions kept on disk."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from quant.config import QuantConfig, parse_quant
from quant.formats.hqq.linears import ReferenceLinear
from quant.quantize_model import LinearQuantizer, SolverConfig, quantize_linears, quantized_copy
from quant.quantized_weight import QuantizedWeight
from quant.switch_linear import QuantizedLinear, Switch
from quant.weight_cache import content_key
from sharesd.weights.quantize import solver_config
from tests.helpers.quant_models import DTYPES, attach, layer_of, new_model, quantized_paths, relative_error


@pytest.mark.parametrize(
    ("dtype", "spec"), [*((dtype, "hqq:4:64") for dtype in DTYPES), (torch.bfloat16, "bnb:4:64,o=8")]
)
def test_switch_chooses_the_weights(dtype: torch.dtype, spec: str) -> None:
    model, tokens = new_model(dtype), torch.arange(7)[None]
    full = model(tokens)
    switch, report = attach(model, spec)
    assert report.num_linears == 9 and report.spec == spec and not report.from_cache
    assert torch.equal(model(tokens), full)
    with switch.quantized_weights():
        low = model(tokens)
    assert 0 < relative_error(low, full) < 0.2
    assert torch.equal(model(tokens), full)


@pytest.mark.parametrize(
    ("spec", "skips", "paths"),
    [
        ("hqq:4", (), {f"blocks.{i}.{p}" for i in range(3) for p in ("qkv", "o", "down_proj")}),
        ("hqq:4", ("layers=0,2",), {f"blocks.1.{p}" for p in ("qkv", "o", "down_proj")}),
        ("hqq:4", ("layers=1-2", "proj=down"), {"blocks.0.qkv", "blocks.0.o"}),
        ("hqq:4,head=8", ("layers=0-1", "proj=o,down_proj"), {"blocks.2.qkv", "head"}),
        ("hqq:4,head=8", ("layers=0-2",), {"head"}),
    ],
)
def test_skips(spec: str, skips: tuple[str, ...], paths: set[str]) -> None:
    _, report = attach(model := new_model(), spec, *skips)
    assert quantized_paths(model) == paths and report.num_linears == len(paths)


def test_bits_per_projection() -> None:
    attach(model := new_model(torch.bfloat16), "hqq:4:64,down=8,head=2")
    kinds = {path: type(model.get_submodule(path).quantized).__name__ for path in quantized_paths(model)}
    assert kinds["blocks.0.down_proj"] == "Int8Linear"
    assert kinds["blocks.0.qkv"] == kinds["head"] == "Int4Linear"


@pytest.mark.parametrize(
    ("spec", "skips", "value", "remedy"),
    [
        ("hqq:4", ("proj=q",), "'q'", "qkv, o, down_proj"),
        ("hqq:4,gate=8", (), "'gate'", "qkv, o, down_proj"),
        ("hqq:4", ("layers=3",), "layer 3", "0 to 2"),
        ("hqq:4", ("layers=0-2",), "layers=0,1,2", "skip less"),
        ("hqq:4,head=4", (), "head has 100 outputs", "leave head full"),  # found last
    ],
)
def test_errors_leave_the_model_alone(spec: str, skips: tuple[str, ...], value: str, remedy: str) -> None:
    model = new_model(vocab=100)
    with pytest.raises(ValueError) as error:
        attach(model, spec, *skips)
    assert value in str(error.value) and remedy in str(error.value)
    assert not quantized_paths(model)


def test_missing_head_is_an_error() -> None:
    with pytest.raises(ValueError, match="lm_head.*drop head=4"):
        quantize_linears(new_model(), parse_quant("hqq:4,head=4"), Switch(), head_name="lm_head", layer_of=layer_of)


def test_four_bits_take_at_most_35_percent_and_every_linear_is_counted() -> None:
    calls: list[tuple[int, int, str]] = []
    _, report = attach(new_model(torch.bfloat16, dim=128), progress=lambda *call: calls.append(call))
    assert report.full_bytes == 3 * 2 * (256 * 128 + 128 * 256 + 128 * 128)
    assert report.quantized_bytes <= 0.35 * report.full_bytes
    assert [call[:2] for call in calls] == [(i, 9) for i in range(1, 10)] and calls[0][2] == "blocks.0.qkv"


def test_make_low_and_quantized_copy_equal_the_switched_model() -> None:
    model, tokens = new_model(torch.bfloat16), torch.arange(7)[None]
    full = model(tokens)
    twin, report = quantized_copy(model, QuantConfig(), head_name="head", layer_of=layer_of)
    assert report.num_linears == 9 and torch.equal(model(tokens), full)
    shared = {p.data_ptr() for p in model.parameters()}
    assert all(p.data_ptr() in shared for p in twin.parameters())
    assert sum(type(module) is nn.Linear for module in twin.modules()) == 1  # the head
    switch, _ = attach(switched := new_model(torch.bfloat16))
    with switch.quantized_weights():
        low = switched(tokens)
    assert torch.equal(twin(tokens), low) and not torch.equal(low, full)
    quantize_linears(model, QuantConfig(), head_name="head", layer_of=layer_of)
    assert torch.equal(model(tokens), low)
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 9


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if ".quantized." in name}


def kept_files(folder: Path) -> list[Path]:
    """One for each of the model's three blocks."""
    files = sorted(folder.iterdir())
    assert len(files) == 3 and {file.suffix for file in files} == {".safetensors"}
    return files


def test_cache_hit_gives_identical_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solver_config = SolverConfig(cache_dir=tmp_path / "new")
    attach(first := new_model(torch.bfloat16), "hqq:4:32,o=3,down=8", solver_config=solver_config)
    monkeypatch.setitem(sys.modules, "hqq.core.quantize", None)  # a hit needs no solver
    _, report = attach(second := new_model(torch.bfloat16), "hqq:4:32,o=3,down=8", solver_config=solver_config)
    assert report.from_cache and report.num_linears == 9
    want, got = tensors_of(first), tensors_of(second)
    assert want.keys() == got.keys() and want
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), lambda raw: raw[:-100], lambda raw: b""]
)
def test_damaged_file_is_rebuilt(damage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    solver_config = SolverConfig(cache_dir=tmp_path)
    attach(first := new_model(), solver_config=solver_config)
    file = kept_files(tmp_path)[1]
    file.write_bytes(damage(file.read_bytes()))
    _, report = attach(second := new_model(), solver_config=solver_config)
    assert not report.from_cache and "quantizing again" in caplog.text
    _, report = attach(third := new_model(), solver_config=solver_config)
    assert report.from_cache and kept_files(tmp_path)
    want, rebuilt, read = map(tensors_of, (first, second, third))
    assert all(torch.equal(want[name], rebuilt[name]) and torch.equal(want[name], read[name]) for name in want)


def test_file_of_another_key_is_not_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attach(new_model(), solver_config=SolverConfig(cache_dir=tmp_path / "a"))
    attach(new_model().double(), solver_config=SolverConfig(cache_dir=tmp_path / "b"))
    kept_files(tmp_path / "b")[0].write_bytes(kept_files(tmp_path / "a")[0].read_bytes())
    _, report = attach(new_model().double(), solver_config=SolverConfig(cache_dir=tmp_path / "b"))
    assert not report.from_cache and "quantizing again" in caplog.text


def test_layers_are_kept_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights come when their turn comes, and what a killed program has solved is not solved again."""
    attach(attached := new_model())
    want, source = tensors_of(attached), new_model()
    solver_config, model = SolverConfig(cache_dir=tmp_path, identity="here"), new_model()
    for block in model.blocks:
        block.to_empty(device="meta")
    options: dict[str, Any] = {"head_name": "head", "layer_of": layer_of, "solver_config": solver_config}
    quantizer = LinearQuantizer(model, QuantConfig(), Switch(), **options, device=torch.device("cpu"))
    assert quantizer.layers() == [0, 1, 2]
    for layer in (2, 0):
        model.blocks[layer] = source.blocks[layer]
        quantizer.quantize(layer)
    assert len(list(tmp_path.iterdir())) == 2 and quantizer.report().num_linears == 6
    _, report = attach(again := new_model(), solver_config=solver_config)
    assert not report.from_cache and not caplog.text and kept_files(tmp_path)
    assert all(torch.equal(want[name], tensor) for name, tensor in tensors_of(again).items())


def test_key_depends_on_weights_and_options() -> None:
    """An identity stands for the values."""
    weight = torch.ones(48, 128)
    other = weight.clone()
    other[0, 0] += 1e-3
    weights = (("a", weight, 4, 64), ("b", weight, 4, 64), ("a", other, 4, 64), ("a", weight, 3, 64))
    keys = [content_key([each]) for each in (*weights, ("a", weight, 4, 32), ("a", weight.bfloat16(), 4, 64))]
    assert len(set(keys)) == 6 and content_key([("a", weight.clone(), 4, 64)]) == keys[0]
    named = content_key([("a", weight, 4, 64)], "here")
    assert named == content_key([("a", other, 4, 64)], "here") != content_key([("a", weight, 4, 64)])
    assert named != content_key([("a", weight, 4, 64)], "there")
    assert named != content_key([("a", weight, 3, 64)], "here")


def test_rounded_rows_are_not_kept(tmp_path: Path) -> None:
    _, report = attach(new_model(), "hqq:8", solver_config=SolverConfig(cache_dir=tmp_path))
    assert not report.from_cache and not list(tmp_path.iterdir())


class PinnedBuffers(TorchDispatchMode):
    """Counts the elements that are copied from another device to the host."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].device.type, out.device.type) == ("cuda", "cpu"):
            self.elements += out.numel()
        return out


def quantized_on_fake_gpu(solver_config: SolverConfig) -> int:
    """Elements that quantizing a model on a GPU copies to the host; its tensors have no values."""

    def solve_fake(weight_NK: Tensor, bits: int, group_size: int) -> QuantizedWeight:
        scale_NG = weight_NK.new_empty(len(weight_NK), weight_NK.shape[1] // group_size, dtype=torch.float32)
        q_NK = torch.empty_like(weight_NK, dtype=torch.uint8)
        return QuantizedWeight(q=q_NK, scale=scale_NG, zero=scale_NG, bits=bits, group_size=group_size)

    def pack_fake(weight: QuantizedWeight, bias: Tensor | None) -> nn.Module:
        return ReferenceLinear(weight, bias, torch.float64)

    with PinnedBuffers() as copies, FakeTensorMode():
        linear = nn.Linear(128, 64, bias=False, device="meta")
        linear.weight = nn.Parameter(torch.empty(64, 128, dtype=torch.float64, device="cuda"), requires_grad=False)
        model = nn.ModuleDict({"layers": nn.ModuleList([linear])})
        options: dict[str, Any] = {"head_name": "head", "layer_of": lambda path: 0, "pack": pack_fake}
        solver_config = replace(solver_config, solve=solve_fake)
        quantize_linears(model, QuantConfig(), Switch(), solver_config=solver_config, **options)
    return copies.elements


def test_weights_on_a_gpu_are_solved_without_a_copy_on_the_host(tmp_path: Path) -> None:
    """Neither hashed, nor kept on disk; a folder to keep them in would need them on the host."""
    assert quantized_on_fake_gpu(solver_config(torch.device("cuda"), tmp_path)) == 0
    with pytest.raises(RuntimeError, match="numpy"):
        quantized_on_fake_gpu(SolverConfig(cache_dir=tmp_path))
