"""The quantized linears: what users may write, what the kernels compute, what a model becomes, what is kept on disk."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from quant.bnb import build_bnb
from quant.config import QuantConfig, parse_quant
from quant.hqq import QuantizedWeight, dequantize, solve
from quant.quantize_model import LinearQuantizer, QuantReport, Solving, make_low, quantize_linears, quantized_copy
from quant.quantized_linear import GemliteLinear, Int4Linear, ReferenceLinear, build_low, check_low
from quant.switch_linear import LowLinear, Switch, SwitchLinear
from quant.weight_cache import content_key
from sharesd.weights.quantize import solving
from tests.helpers.paths import ROOT

# Largest relative error of a product against float64: about the rounding of the output itself.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6, torch.float64: 1e-14}
DTYPES = list(TOLERANCE)


class Block(nn.Module):
    """Three linears that work on the same residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 2 * dim, bias=True)
        self.o = nn.Linear(2 * dim, dim, bias=False)
        self.down_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(torch.tanh(self.qkv(x)))
        return x + self.down_proj(torch.tanh(x))


class Model(nn.Module):
    """An embedding, a few blocks, a head."""

    def __init__(self, dim: int = 64, num_layers: int = 3, vocab: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Conv1D(nn.Module):
    """The layout of GPT-2's linears in transformers: weight [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.1)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def layer_of(path: str) -> int | None:
    return int(path.split(".")[1]) if path.startswith("blocks.") else None


def new_model(dtype: torch.dtype = torch.float32, **shape: int) -> Model:
    torch.manual_seed(0)
    return Model(**shape).to(dtype).eval().requires_grad_(False)


def attach(model: nn.Module, spec: str = "hqq:4:64", *skips: str, **options) -> tuple[Switch, QuantReport]:
    switch = Switch()
    config = QuantConfig.parse(spec, skips)
    return switch, quantize_linears(model, config, switch, head_name="head", layer_of=layer_of, **options)


def quantized_paths(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if isinstance(module, SwitchLinear)}


def weight_of(N: int = 48, K: int = 128, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, K, generator=generator) * 0.02 + 0.003


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


# Options


@pytest.mark.parametrize(
    ("spec", "skips", "canonical"),
    [
        ("hqq", (), "hqq:4:64"),
        ("hqq:4:64", (), "hqq:4:64"),
        ("hqq:8", (), "hqq:8:64"),
        ("bnb:8", (), "bnb:8:64"),
        ("hqq:2:32,o=8,down=4,head=8", (), "hqq:2:32,down=4,o=8,head=8"),
        ("hqq:4", ("layers=29,0", "proj=o,down"), "hqq:4:64 skip layers=0,29 skip proj=down,o"),
        ("hqq:4", ("layers=1-3", "layers=3,7"), "hqq:4:64 skip layers=1,2,3,7"),
        ("hqq:4", ("proj=head",), "hqq:4:64"),
    ],
)
def test_config_round_trip(spec: str, skips: tuple[str, ...], canonical: str) -> None:
    config = QuantConfig.parse(spec, skips)
    assert str(config) == canonical
    again = QuantConfig.parse(config.spec, config.skips)
    assert again == config and hash(again) == hash(config)


def test_config_defaults_and_dataclass_form() -> None:
    assert QuantConfig() == parse_quant("hqq:4:64")
    assert QuantConfig(proj_bits={"o": 8, "down": 2}) == parse_quant("hqq:4:64,down=2,o=8")
    assert QuantConfig(skip_layers=(3, 1, 3), skip_projs=("o",)).skips == ("layers=1,3", "proj=o")


@pytest.mark.parametrize(
    ("spec", "skips", "value", "remedy"),
    [
        ("gptq:4", (), "gptq", "hqq, bnb"),
        ("", (), "''", "hqq, bnb"),
        ("hqq:4:64:1", (), "hqq:4:64:1", "METHOD:BITS:GROUP"),
        ("hqq:four", (), "'four'", "hqq:4:64"),
        ("hqq:5", (), "5", "8, 4, 3, 2"),
        ("bnb:3", (), "3", "8, 4"),
        ("hqq:4:48", (), "48", "32, 64, 128, 256"),
        ("bnb:4:32", (), "32", "64, 128, 256"),
        ("hqq:4,down", (), "''", "down=8"),
        ("hqq:4,down=5", (), "down", "8, 4, 3, 2"),
        ("hqq:4,=8", (), "empty", "down=8"),
        ("hqq:4,o=8,o=4", (), "o twice", "keep one"),
        ("hqq:4,head=7", (), "head", "8, 4, 3, 2"),
        ("hqq:4", ("layer=3",), "layer=3", "layers=0,29"),
        ("hqq:4", ("layers=",), "layers=", "layers=0,29"),
        ("hqq:4", ("layers=-1",), "layers=-1", "layers=0,29"),
        ("hqq:4", ("layers=a",), "'a'", "layers=0,29"),
        ("hqq:4", ("proj=o,",), "empty", "proj=down"),
        ("hqq:4,o=8", ("proj=o",), "'o'", "drop one"),
        ("hqq:4,head=8", ("proj=head",), "head", "drop one"),
    ],
)
def test_config_errors_name_value_and_remedy(spec: str, skips: tuple[str, ...], value: str, remedy: str) -> None:
    with pytest.raises(ValueError) as error:
        QuantConfig.parse(spec, skips)
    assert value in str(error.value) and remedy in str(error.value)


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [({"skip_layers": (-1,)}, "from 0"), ({"proj_bits": {"head": 8}}, "head_bits=8"), ({"method": "awq"}, "hqq, bnb")],
)
def test_config_errors_of_the_dataclass(fields: dict, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        QuantConfig(**fields)


@pytest.mark.subprocess
def test_nothing_heavy_is_imported_early() -> None:
    code = (
        "import sys, quant.config\n"
        "assert 'torch' not in sys.modules\n"
        "import quant.quantize_model, quant.bnb, quant.quantized_linear\n"
        "import quant.switch_linear, quant.hqq, quant.weight_cache\n"
        "print(sorted({'hqq', 'gemlite', 'bitsandbytes', 'transformers'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# Solver


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_hqq_beats_rounding_to_nearest(bits: int) -> None:
    weight = torch.distributions.StudentT(5.0).sample((256, 128)) * 0.02
    solved = solve(weight, bits, 64)
    assert solved.q.shape == weight.shape and solved.scale.shape == solved.zero.shape == (256, 2)
    assert solved.q.dtype == torch.uint8 and solved.q.max() <= 2**bits - 1
    groups = weight.unflatten(-1, (-1, 64))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    nearest = (((groups - low) / step).round() * step + low).flatten(-2)
    assert (solved.dequantize() - weight).abs().mean() < 0.99 * (nearest - weight).abs().mean()


def test_solver_gives_ordinary_tensors_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(40, 64)
    whole = solve(weight, 4, 64)
    monkeypatch.setitem(sys.modules["quant.hqq"]._BLOCK_WEIGHTS, "cpu", 7 * 64)
    blocks = solve(weight, 4, 64)
    assert blocks.q.shape == whole.q.shape
    assert relative_error(blocks.dequantize(), weight) < 1.05 * relative_error(whole.dequantize(), weight)
    assert not any(tensor.is_inference() for tensor in (blocks.q, blocks.scale, blocks.zero))


def test_eight_bits_are_symmetric_rows() -> None:
    weight = weight_of()
    weight[3] = 0
    solved = solve(weight, 8, 64)
    assert solved.scale.shape == (48, 1) and solved.zero.unique().tolist() == [128]
    assert (solved.dequantize() - weight).abs().amax() <= weight.abs().amax() / 254 * 1.001
    assert solved.dequantize()[3].abs().amax() == 0


# Kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_kernel_equals_dequantized_product(bits: int, dtype: torch.dtype) -> None:
    solved = solve(weight_of(), bits, 32)
    bias = torch.randn(48).to(dtype)
    low = build_low("x.o", solved, bias, dtype=dtype)
    x = torch.randn(2, 3, 256).to(dtype)[..., ::2]  # leading dimensions, not contiguous
    exact = dequantize(solved.q, solved.scale.double(), solved.zero.double())
    want = x.double() @ exact.t() + bias.double()
    for rows in (x, x[0, 0], x[:, :1]):
        got = low(rows)
        assert got.shape == (*rows.shape[:-1], 48) and got.dtype == dtype
    assert relative_error(low(x), want) < TOLERANCE[dtype]


def test_rounded_scales_cost_little_at_two_bits() -> None:
    """Codes are centred in the 4-bit container; at its edge, rounding the offset to bfloat16 would cost far more."""
    solved = solve(weight_of(64, 256), 2, 64)
    low = build_low("x.o", solved, None, dtype=torch.bfloat16)
    seen = low(torch.eye(256, dtype=torch.bfloat16)).t()
    assert relative_error(seen, solved.dequantize()) < 4e-3


def test_low_bytes_are_buffers_without_a_full_copy() -> None:
    solved, bias = solve(weight_of(64, 512), 4, 64), torch.randn(64)
    low = build_low("x.o", solved, bias, dtype=torch.bfloat16)
    assert low.nbytes == 64 * 512 // 2 + 2 * 2 * 64 * 8
    assert set(low.state_dict()) == {"bias", "packed", "scales_and_offsets"}
    assert low.bias is not None and low.bias.data_ptr() == bias.data_ptr()
    hidden = [value for value in vars(low).values() if isinstance(value, Tensor)]
    assert not hidden


@pytest.mark.parametrize(
    ("shape", "bits", "dtype", "device", "reason", "remedy"),
    [
        ((64, 100), 4, torch.bfloat16, "cpu", "64 do not divide 100", "leave down full"),
        ((72, 64), 4, torch.bfloat16, "cpu", "72 outputs", "down=8"),
        ((72, 72), 8, torch.bfloat16, "cpu", "72 inputs", "leave down full"),
        ((64, 64), 4, torch.float8_e4m3fn, "cpu", "float8_e4m3fn", "float16"),
        ((64, 64), 3, torch.bfloat16, "cuda", "3 bits", "8, 4 or 2"),
        ((64, 48), 8, torch.bfloat16, "cuda", "48 inputs", "leave down full"),
        ((64, 64), 4, torch.bfloat16, "meta", "meta", "cpu or cuda"),
    ],
)
def test_shapes_no_kernel_takes(
    shape: tuple[int, int], bits: int, dtype: torch.dtype, device: str, reason: str, remedy: str
) -> None:
    with pytest.raises(ValueError) as error:
        check_low("blocks.1.down", shape, bits=bits, group_size=64, dtype=dtype, device=torch.device(device))
    assert all(part in str(error.value) for part in ("blocks.1.down", reason, remedy))


@pytest.mark.parametrize("package", ["hqq", "gemlite", "bitsandbytes"])
def test_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (package, "hqq.core.quantize"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"pip install {package}"):
        if package == "hqq":
            solve(weight_of(), 4, 64)
        elif package == "gemlite":
            check_low("o", (64, 64), bits=4, group_size=64, dtype=torch.float16, device=torch.device("cuda"))
        else:
            build_bnb(weight_of(), None, bits=4, group_size=64)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_gemlite_is_given_and_gives_back_what_it_needs(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the calls of gemlite 0.6: tensors and metadata must reach its operator unchanged."""

    class Packed:
        def __init__(self, *tensors: Tensor) -> None:
            self.tensors = tensors

        def get_tensor_args(self) -> list[Tensor]:
            return list(self.tensors)

        def get_meta_args(self) -> list[int]:
            return [7]

    class A16Wn:
        def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
            assert device.type == "cpu" and dtype == torch.float32

        def from_weights(self, W_q, scales, zeros, W_nbits, group_size, bias=None) -> Packed:
            assert W_q.dtype == torch.uint8 and W_nbits == bits and group_size == 64 and bias is None
            return Packed(QuantizedWeight(q=W_q, scale=scales, zero=zeros, bits=bits, group_size=64).dequantize())

    class A16W8(A16Wn):
        def from_weights(self, weight, bias=None, scales=None) -> Packed:  # type: ignore[override]
            assert weight.dtype == torch.int8 and bias is None and scales.shape == (48, 1)
            return Packed(weight.float() * scales)

    def forward(x: Tensor, bias: Tensor, tensors: list[Tensor], meta: list[int]) -> Tensor:
        assert meta == [7]
        return nn.functional.linear(x, tensors[0], bias)

    atomics: list[bool] = []
    helper = SimpleNamespace(A16Wn=A16Wn, A16W8_INT8=A16W8)
    fake = SimpleNamespace(helper=helper, set_native_atomic_bfp16=atomics.append)
    monkeypatch.setitem(sys.modules, "gemlite", fake)
    monkeypatch.setattr(torch.ops, "gemlite", SimpleNamespace(forward_functional=forward), raising=False)
    solved, bias = solve(weight_of(), bits, 64), torch.randn(48)
    low = GemliteLinear(solved, bias, torch.float32)
    assert atomics == ([False] if bits == 8 else [])
    x = torch.randn(2, 3, 128)
    assert relative_error(low(x), x @ solved.dequantize().t() + bias) < 1e-6
    assert low.nbytes == 4 * 48 * 128


@pytest.mark.parametrize("adds_zero", [True, False])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_gemlite_gets_few_rows_only(bits: int, adds_zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are multiplied by weights dequantized from gemlite's layout: words of 32 bits along the inputs."""

    class Packed(SimpleNamespace):
        def get_tensor_args(self) -> list[Tensor]:
            return [self.words, self.scales, self.zeros]

        def get_meta_args(self) -> list[int]:
            return [0] * 10 + [4 if adds_zero else 3]

    class A16Wn:
        def __init__(self, **place: object) -> None:
            pass

        def from_weights(self, q, scales, zeros, W_nbits, group_size) -> Packed:
            words_NP = torch.zeros(len(q), q.shape[1] * W_nbits // 32, dtype=torch.int64)
            for k in range(q.shape[1]):
                words_NP[:, k * W_nbits // 32] |= q[:, k].long() << (k * W_nbits % 32)
            zeros = -zeros * scales if adds_zero else zeros
            return Packed(words=words_NP.to(torch.int32).t(), scales=scales.t(), zeros=zeros.t())

    class A16W8(A16Wn):
        def from_weights(self, weight, bias=None, scales=None) -> Packed:  # type: ignore[override]
            return Packed(words=weight.t(), scales=scales.t(), zeros=torch.zeros(1, 0))

    rows: list[int] = []

    def forward(x: Tensor, bias: Tensor, tensors: list[Tensor], meta: list[int]) -> Tensor:
        rows.append(x.numel() // x.shape[-1])
        return x.new_zeros(*x.shape[:-1], 48)

    helper = SimpleNamespace(A16Wn=A16Wn, A16W8_INT8=A16W8)
    fake = SimpleNamespace(helper=helper, set_native_atomic_bfp16=lambda on: None)
    monkeypatch.setitem(sys.modules, "gemlite", fake)
    monkeypatch.setattr(torch.ops, "gemlite", SimpleNamespace(forward_functional=forward), raising=False)
    solved, bias = solve(weight_of(), bits, 64), torch.randn(48)
    low = GemliteLinear(solved, bias, torch.float32)
    low(torch.randn(1, 16, 128))
    x = torch.randn(1, 17, 128)
    assert relative_error(low(x), x @ solved.dequantize().t() + bias) < 1e-5
    assert rows == [16]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_gemlite_equals_dequantized_product(bits: int, dtype: torch.dtype) -> None:
    pytest.importorskip("gemlite")
    weight = weight_of(256, 512).cuda()
    solved, bias = solve(weight, bits, 64), torch.randn(256, device="cuda", dtype=dtype)
    low = build_low("x.o", solved, bias, dtype=dtype)
    assert isinstance(low, GemliteLinear)
    compiled = torch.compile(low, fullgraph=True)
    for rows in (1, 5, 80):
        x = torch.randn(1, rows, 512, device="cuda", dtype=dtype)
        want = x.double() @ solved.dequantize().double().t() + bias.double()
        assert relative_error(low(x), want) < 2e-2
        assert relative_error(compiled(x), want) < 2e-2


# Compilation


@pytest.mark.parametrize("bits", [8, 4])
def test_switched_linear_compiles_once(bits: int) -> None:
    torch.compiler.reset()
    full, switch = nn.Linear(64, 48).bfloat16(), Switch()
    low = build_low("o", solve(full.weight, bits, 64), full.bias, dtype=torch.bfloat16)
    layer = SwitchLinear(full, low, switch)
    x = torch.randn(1, 1, 64, dtype=torch.bfloat16)
    with torch.no_grad(), switch.use_low():
        compiled = torch.compile(layer, fullgraph=True, dynamic=False)
        first = compiled(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            second = compiled(x + 1)
        assert torch.equal(first, low(x)) and torch.equal(second, low(x + 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_forward_traces_without_branches_on_data(bits: int, dtype: torch.dtype) -> None:
    low = build_low("o", solve(weight_of(), bits, 64), torch.randn(48, dtype=dtype), dtype=dtype)
    x = torch.randn(2, 3, 128, dtype=dtype)
    graph = make_fx(low)(x)
    assert torch.equal(graph(x + 1), low(x + 1))


# bitsandbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "error"), [(4, 0.12), (8, 0.02)])
def test_bnb_on_cpu(bits: int, error: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    weight, bias = weight_of(64).to(dtype), torch.randn(64).to(dtype)
    low = build_bnb(weight, bias, bits=bits, group_size=64)
    x = torch.randn(2, 3, 128).to(dtype)
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        eager = low(x)
        compiled = torch.compile(low, fullgraph=True, backend="aot_eager")(x)
    assert not caplog.records
    assert eager.dtype == dtype and eager.shape == (2, 3, 64)
    assert relative_error(eager, x.double() @ weight.double().t() + bias.double()) < error
    assert torch.equal(eager, compiled)
    assert low.nbytes <= 64 * 128 * bits // 8 + 4 * 64 * 2


@pytest.mark.parametrize(
    ("shape", "bits", "dtype", "reason", "remedy"),
    [
        ({"dim": 48}, 4, torch.bfloat16, "64 do not divide 48", "leave qkv full"),
        ({"vocab": 80}, 4, torch.bfloat16, "80 outputs", "leave head full"),
        ({}, 8, torch.float64, "float64", "or hqq"),
    ],
)
def test_bnb_refuses(shape: dict[str, int], bits: int, dtype: torch.dtype, reason: str, remedy: str) -> None:
    model = new_model(dtype, **shape)
    with pytest.raises(ValueError) as error:
        attach(model, f"bnb:{bits}:64,head={bits}")
    assert reason in str(error.value) and remedy in str(error.value)
    assert not quantized_paths(model)


def test_bnb_serves_a_model() -> None:
    model, tokens = new_model(torch.bfloat16), torch.arange(7)[None]
    full = model(tokens)
    switch, report = attach(model, "bnb:4,o=8")
    assert report.num_linears == 9 and not report.from_cache
    assert torch.equal(model(tokens), full)
    with switch.use_low():
        assert 0 < relative_error(model(tokens), full) < 0.2


# Attaching to a model


@pytest.mark.parametrize("dtype", DTYPES)
def test_switch_chooses_the_weights(dtype: torch.dtype) -> None:
    model, tokens = new_model(dtype), torch.arange(7)[None]
    full = model(tokens)
    switch, report = attach(model)
    assert report.num_linears == 9 and report.spec == "hqq:4:64"
    assert torch.equal(model(tokens), full)
    with switch.use_low():
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
    model = new_model()
    _, report = attach(model, spec, *skips)
    assert quantized_paths(model) == paths
    assert report.num_linears == len(paths)


def test_bits_per_projection() -> None:
    model = new_model(torch.bfloat16)
    attach(model, "hqq:4:64,down=8,head=2")
    kinds = {path: type(model.get_submodule(path).low).__name__ for path in quantized_paths(model)}
    assert kinds["blocks.0.down_proj"] == "Int8Linear"
    assert kinds["blocks.0.qkv"] == kinds["head"] == "Int4Linear"


@pytest.mark.parametrize(
    ("spec", "skips", "value", "remedy"),
    [
        ("hqq:4", ("proj=q",), "'q'", "qkv, o, down_proj"),
        ("hqq:4,gate=8", (), "'gate'", "qkv, o, down_proj"),
        ("hqq:4", ("layers=3",), "layer 3", "0 to 2"),
        ("hqq:4", ("layers=0-2",), "layers=0,1,2", "skip less"),
    ],
)
def test_names_that_the_model_has_not(spec: str, skips: tuple[str, ...], value: str, remedy: str) -> None:
    model = new_model()
    with pytest.raises(ValueError) as error:
        attach(model, spec, *skips)
    assert value in str(error.value) and remedy in str(error.value)
    assert not quantized_paths(model)


def test_missing_head_is_an_error() -> None:
    with pytest.raises(ValueError, match="lm_head.*drop head=4"):
        quantize_linears(new_model(), parse_quant("hqq:4,head=4"), Switch(), head_name="lm_head", layer_of=layer_of)


def test_late_errors_leave_the_model_alone() -> None:
    model = new_model(vocab=100)
    with pytest.raises(ValueError, match="head has 100 outputs"):
        attach(model, "hqq:4:64,head=4")
    assert not quantized_paths(model)


@pytest.mark.parametrize(("spec", "error"), [("hqq:8", 0.01), ("hqq:4", 0.1), ("bnb:8", 0.02), ("bnb:4", 0.11)])
def test_conv1d_of_gpt2(spec: str, error: float) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"c_attn": Conv1D(64, 96)}).eval().requires_grad_(False)
    switch, x = Switch(), torch.randn(2, 64)
    want = model["c_attn"](x)
    report = quantize_linears(model, parse_quant(spec), switch, head_name="head", layer_of=lambda path: 0)
    assert report.num_linears == 1 and report.full_bytes == 4 * 64 * 96
    assert torch.equal(model["c_attn"](x), want)
    with switch.use_low():
        assert 0 < relative_error(model["c_attn"](x), want) < error


def test_four_bits_take_at_most_35_percent() -> None:
    _, report = attach(new_model(torch.bfloat16, dim=128))
    assert report.full_bytes == 3 * 2 * (256 * 128 + 128 * 256 + 128 * 128)
    assert report.low_bytes <= 0.35 * report.full_bytes


def test_progress_counts_every_linear() -> None:
    calls: list[tuple[int, int, str]] = []
    attach(new_model(), progress=lambda done, total, what: calls.append((done, total, what)))
    assert [call[:2] for call in calls] == [(i, 9) for i in range(1, 10)]
    assert calls[0][2] == "blocks.0.qkv"


def test_make_low_and_quantized_copy_equal_the_switched_model() -> None:
    model, tokens = new_model(torch.bfloat16), torch.arange(7)[None]
    full = model(tokens)
    twin, report = quantized_copy(model, QuantConfig(), head_name="head", layer_of=layer_of)
    assert report.num_linears == 9
    assert torch.equal(model(tokens), full)
    shared = {p.data_ptr() for p in model.parameters()}
    assert all(p.data_ptr() in shared for p in twin.parameters())
    assert sum(type(module) is nn.Linear for module in twin.modules()) == 1  # the head

    switch, _ = attach(switched := new_model(torch.bfloat16))
    with switch.use_low():
        low = switched(tokens)
    assert torch.equal(twin(tokens), low) and not torch.equal(low, full)

    make_low(model, QuantConfig(), head_name="head", layer_of=layer_of)
    assert torch.equal(model(tokens), low)
    assert sum(isinstance(module, LowLinear) for module in model.modules()) == 9


# The cache on disk


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if ".low." in name}


def kept_files(folder: Path) -> list[Path]:
    """One for each of the model's three blocks."""
    files = sorted(folder.iterdir())
    assert len(files) == 3 and {file.suffix for file in files} == {".safetensors"}
    return files


def test_cache_hit_gives_identical_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attach(first := new_model(torch.bfloat16), "hqq:4:32,o=3,down=8", solving=Solving(cache_dir=tmp_path / "new"))
    monkeypatch.setitem(sys.modules, "hqq.core.quantize", None)  # a hit needs no solver
    _, report = attach(
        second := new_model(torch.bfloat16), "hqq:4:32,o=3,down=8", solving=Solving(cache_dir=tmp_path / "new")
    )
    assert report.from_cache and report.num_linears == 9
    want, got = tensors_of(first), tensors_of(second)
    assert want.keys() == got.keys() and want
    assert all(torch.equal(want[name], got[name]) for name in want)


def damage_end(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        damage_end,
        lambda file: file.write_bytes(file.read_bytes()[:-100]),
        lambda file: file.write_bytes(b""),
    ],
    ids=["one bit", "cut", "empty"],
)
def test_damaged_file_is_rebuilt(damage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attach(first := new_model(), solving=Solving(cache_dir=tmp_path))
    damage(kept_files(tmp_path)[1])
    with caplog.at_level(logging.WARNING):
        _, report = attach(second := new_model(), solving=Solving(cache_dir=tmp_path))
    assert not report.from_cache and "quantizing again" in caplog.text
    _, report = attach(third := new_model(), solving=Solving(cache_dir=tmp_path))
    assert report.from_cache and kept_files(tmp_path)
    want, rebuilt, read = map(tensors_of, (first, second, third))
    assert all(torch.equal(want[name], rebuilt[name]) and torch.equal(want[name], read[name]) for name in want)


def test_file_of_another_key_is_not_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attach(new_model(), solving=Solving(cache_dir=tmp_path / "a"))
    attach(new_model().double(), solving=Solving(cache_dir=tmp_path / "b"))
    kept_files(tmp_path / "b")[0].write_bytes(kept_files(tmp_path / "a")[0].read_bytes())
    _, report = attach(new_model().double(), solving=Solving(cache_dir=tmp_path / "b"))
    assert not report.from_cache and "quantizing again" in caplog.text


def test_layers_are_kept_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights come when their turn comes, and what a killed program has solved is not solved again."""
    attach(attached := new_model())
    want, source = tensors_of(attached), new_model()
    solving, model = Solving(cache_dir=tmp_path, identity="here"), new_model()
    for block in model.blocks:
        block.to_empty(device="meta")
    options: dict[str, Any] = {"head_name": "head", "layer_of": layer_of, "solving": solving}
    quantizer = LinearQuantizer(model, QuantConfig(), Switch(), **options, device=torch.device("cpu"))
    assert quantizer.layers() == [0, 1, 2]
    for layer in (2, 0):
        model.blocks[layer] = source.blocks[layer]
        quantizer.quantize(layer)
    assert len(list(tmp_path.iterdir())) == 2 and quantizer.report().num_linears == 6
    with caplog.at_level(logging.WARNING):
        _, report = attach(again := new_model(), solving=solving)
    assert not report.from_cache and not caplog.text and kept_files(tmp_path)
    assert all(torch.equal(want[name], tensor) for name, tensor in tensors_of(again).items())


def test_cache_that_cannot_be_written_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    _, report = attach(new_model(), solving=Solving(cache_dir=tmp_path / "file" / "cache"))
    assert report.num_linears == 9 and "cannot keep" in caplog.text


def test_key_depends_on_weights_and_options() -> None:
    weight = weight_of()
    other = weight.clone()
    other[0, 0] += 1e-3
    keys = {
        content_key([("a", weight, 4, 64)]),
        content_key([("b", weight, 4, 64)]),
        content_key([("a", other, 4, 64)]),
        content_key([("a", weight, 3, 64)]),
        content_key([("a", weight, 4, 32)]),
        content_key([("a", weight.bfloat16(), 4, 64)]),
    }
    assert len(keys) == 6
    assert content_key([("a", weight.clone(), 4, 64)]) in keys


def test_an_identity_stands_for_the_values() -> None:
    weight, other = weight_of(), weight_of(seed=1)
    named = content_key([("a", weight, 4, 64)], "here")
    assert named == content_key([("a", other, 4, 64)], "here") != content_key([("a", weight, 4, 64)])
    assert named != content_key([("a", weight, 4, 64)], "there")
    assert named != content_key([("a", weight, 3, 64)], "here")


def test_rounded_rows_are_not_kept(tmp_path: Path) -> None:
    _, report = attach(new_model(), "hqq:8", solving=Solving(cache_dir=tmp_path))
    assert not report.from_cache and not list(tmp_path.iterdir())


def test_int4_container_serves_fewer_bits() -> None:
    sizes = {
        bits: build_low("o", solve(weight_of(), bits, 64), None, dtype=torch.bfloat16).nbytes for bits in (4, 3, 2)
    }
    assert len(set(sizes.values())) == 1
    assert isinstance(build_low("o", solve(weight_of(), 2, 64), None, dtype=torch.bfloat16), Int4Linear)


class HostCopies(TorchDispatchMode):
    """Counts the elements that are copied from another device to the host."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].device.type, out.device.type) == ("cuda", "cpu"):
            self.elements += out.numel()
        return out


def quantized_on_fake_gpu(solving: Solving) -> int:
    """Elements that quantizing a model on a GPU copies to the host; its tensors have no values."""

    def solve_fake(weight_NK: Tensor, bits: int, group_size: int) -> QuantizedWeight:
        scale_NG = weight_NK.new_empty(len(weight_NK), weight_NK.shape[1] // group_size, dtype=torch.float32)
        q_NK = torch.empty_like(weight_NK, dtype=torch.uint8)
        return QuantizedWeight(q=q_NK, scale=scale_NG, zero=scale_NG, bits=bits, group_size=group_size)

    def build_fake(weight: QuantizedWeight, bias: Tensor | None) -> nn.Module:
        return ReferenceLinear(weight, bias, torch.float64)

    with HostCopies() as copies, FakeTensorMode():
        linear = nn.Linear(128, 64, bias=False, device="meta")
        linear.weight = nn.Parameter(torch.empty(64, 128, dtype=torch.float64, device="cuda"), requires_grad=False)
        model = nn.ModuleDict({"layers": nn.ModuleList([linear])})
        quantize_linears(
            model,
            QuantConfig(),
            Switch(),
            head_name="head",
            layer_of=lambda path: 0,
            solving=replace(solving, solve=solve_fake),
            build=build_fake,
        )
    return copies.elements


def test_weights_on_a_gpu_are_solved_without_a_copy_on_the_host(tmp_path: Path) -> None:
    """Neither hashed, nor kept on disk; a folder to keep them in would need them on the host."""
    assert quantized_on_fake_gpu(solving(torch.device("cuda"), tmp_path)) == 0
    with pytest.raises(RuntimeError, match="numpy"):
        quantized_on_fake_gpu(Solving(cache_dir=tmp_path))
