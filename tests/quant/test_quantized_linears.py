"""Solvers, and the linears that multiply by what they give."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from compile.linear import QuantizedPackedLinear
from quant.formats import FORMATS
from quant.formats.bnb.linears import linear as bnb_linear
from quant.formats.hqq.gemlite import GemliteLinear
from quant.formats.hqq.linears import cpu_linear, cuda_linear
from quant.formats.hqq.solver import solve
from quant.quantized_weight import dequantize
from quant.switch_linear import Switch, SwitchLinear
from tests.helpers.paths import ROOT
from tests.helpers.quant_models import DTYPES, TOLERANCE, attach, new_model, quantized_paths, relative_error, weight_of


@pytest.mark.subprocess
def test_nothing_heavy_is_imported_early() -> None:
    code = (
        "import sys, quant.config\n"
        "assert 'torch' not in sys.modules\n"
        "import quant.quantize_model, quant.formats.bnb.linears, quant.formats.hqq.linears\n"
        "import quant.switch_linear, quant.formats.hqq.solver, quant.weight_cache\n"
        "print(sorted({'hqq', 'gemlite', 'bitsandbytes', 'transformers'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_solver_gives_ordinary_tensors_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(40, 64)
    whole = solve(weight, 4, 64)
    monkeypatch.setitem(sys.modules["quant.formats.hqq.solver"]._BLOCK_WEIGHTS, "cpu", 7 * 64)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_kernel_equals_dequantized_product(bits: int, dtype: torch.dtype) -> None:
    solved = solve(weight_of(), bits, 32)
    bias = torch.randn(48).to(dtype)
    low = cpu_linear("x.o", solved, bias, dtype=dtype)
    x = torch.randn(2, 3, 256).to(dtype)[..., ::2]  # leading dimensions, not contiguous
    exact = dequantize(solved.q, solved.scale.double(), solved.zero.double())
    want = x.double() @ exact.t() + bias.double()
    for rows in (x, x[0, 0], x[:, :1]):
        got = low(rows)
        assert got.shape == (*rows.shape[:-1], 48) and got.dtype == dtype
    assert relative_error(low(x), want) < TOLERANCE[dtype]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [8, 4])
def test_sums_of_the_largest_codes_do_not_overflow(bits: int, sign: int) -> None:
    """With AVX2 alone, products with codes of 4 bits are added in 16 bits."""
    codes = torch.full((48, 128), 2**bits - 1, dtype=torch.uint8)
    low = QuantizedPackedLinear(codes, torch.ones(48, 2), torch.zeros(48, 2), None, bits=bits)
    want = sign * 128 * (2 ** (bits - 1) - 1)
    for rows in (1, 2, 5, 9):
        assert (low(torch.full((rows, 128), float(sign))) - want).abs().max() <= 1e-4 * abs(want)


def test_rounded_scales_cost_little_at_two_bits() -> None:
    """Codes are centred in the 4-bit container; at its edge, rounding the offset to bfloat16 would cost far more."""
    solved = solve(weight_of(64, 256), 2, 64)
    low = cpu_linear("x.o", solved, None, dtype=torch.bfloat16)
    seen = low(torch.eye(256, dtype=torch.bfloat16)).t()
    assert relative_error(seen, solved.dequantize()) < 4e-3


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
    place = torch.device(device)
    with pytest.raises(ValueError) as error:
        FORMATS["hqq"].check_linear("blocks.1.down", shape, bits=bits, group_size=64, dtype=dtype, device=place)
    assert all(part in str(error.value) for part in ("blocks.1.down", reason, remedy))


@pytest.mark.parametrize("package", ["hqq", "gemlite", "bitsandbytes"])
def test_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (package, "hqq.core.quantize"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"pip install {package}"):
        if package == "hqq":
            solve(weight_of(), 4, 64)
        elif package == "gemlite":
            cuda = torch.device("cuda")
            FORMATS["hqq"].check_linear("o", (64, 64), bits=4, group_size=64, dtype=torch.float16, device=cuda)
        else:
            bnb_linear("o", weight_of(), None, bits=4, group_size=64, dtype=torch.float32)


@pytest.mark.parametrize("adds_zero", [True, False])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_gemlite_gets_few_rows_only(bits: int, adds_zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the calls of gemlite 0.6: tensors and metadata must reach its operator unchanged. Prompts are
    multiplied by weights dequantized from gemlite's layout: words of 32 bits along the inputs."""
    meta = [0] * 10 + [4 if adds_zero else 3]

    class Packed(SimpleNamespace):
        def get_tensor_args(self) -> list[Tensor]:
            return [self.words, self.scales, self.zeros]

        def get_meta_args(self) -> list[int]:
            return meta

    class A16Wn:
        def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
            assert device.type == "cpu" and dtype == torch.float32

        def from_weights(self, q, scales, zeros, W_nbits, group_size) -> Packed:
            assert q.dtype == torch.uint8 and W_nbits == bits and group_size == 64
            words_NP = torch.zeros(len(q), q.shape[1] * W_nbits // 32, dtype=torch.int64)
            for k in range(q.shape[1]):
                words_NP[:, k * W_nbits // 32] |= q[:, k].long() << (k * W_nbits % 32)
            zeros = -zeros * scales if adds_zero else zeros
            return Packed(words=words_NP.to(torch.int32).t(), scales=scales.t(), zeros=zeros.t())

    class A16W8(A16Wn):
        def from_weights(self, weight, bias=None, scales=None) -> Packed:  # type: ignore[override]
            assert weight.dtype == torch.int8 and bias is None and scales.shape == (48, 1)
            return Packed(words=weight.t(), scales=scales.t(), zeros=torch.zeros(1, 0))

    rows, atomics = list[int](), list[bool]()

    def forward(x: Tensor, bias: Tensor, tensors: list[Tensor], given: list[int]) -> Tensor:
        rows.append(x.numel() // x.shape[-1])
        assert given is meta
        return nn.functional.linear(x, low._dequantized(*tensors), bias)

    helper = SimpleNamespace(A16Wn=A16Wn, A16W8_INT8=A16W8)
    fake = SimpleNamespace(helper=helper, set_native_atomic_bfp16=atomics.append)
    monkeypatch.setitem(sys.modules, "gemlite", fake)
    monkeypatch.setattr(torch.ops, "gemlite", SimpleNamespace(forward_functional=forward), raising=False)
    solved, bias = solve(weight_of(), bits, 64), torch.randn(48)
    low = GemliteLinear(solved, bias, torch.float32)
    assert low.nbytes == 48 * 128 * bits // 8 + (4 * 48 if bits == 8 else 2 * 4 * 48 * 2)
    assert atomics == ([False] if bits == 8 else [])
    for num_rows in (16, 17):
        x = torch.randn(1, num_rows, 128)
        assert relative_error(low(x), x @ solved.dequantize().t() + bias) < 1e-5
    assert rows == [16]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_gemlite_equals_dequantized_product(bits: int, dtype: torch.dtype) -> None:
    pytest.importorskip("gemlite")
    weight = weight_of(256, 512).cuda()
    solved, bias = solve(weight, bits, 64), torch.randn(256, device="cuda", dtype=dtype)
    low = cuda_linear("x.o", solved, bias, dtype=dtype)
    assert isinstance(low, GemliteLinear)
    compiled = torch.compile(low, fullgraph=True)
    for rows in (1, 5, 80):
        x = torch.randn(1, rows, 512, device="cuda", dtype=dtype)
        want = x.double() @ solved.dequantize().double().t() + bias.double()
        assert relative_error(low(x), want) < 2e-2 and relative_error(compiled(x), want) < 2e-2


@pytest.mark.inductor
@pytest.mark.parametrize("bits", [8, 4])
def test_switched_linear_compiles_once(bits: int) -> None:
    torch.compiler.reset()
    full, switch = nn.Linear(64, 48).bfloat16(), Switch()
    low = cpu_linear("o", solve(full.weight, bits, 64), full.bias, dtype=torch.bfloat16)
    layer = SwitchLinear(full, low, switch)
    x = torch.randn(1, 1, 64, dtype=torch.bfloat16)
    with torch.no_grad(), switch.quantized_weights():
        compiled = torch.compile(layer, fullgraph=True, dynamic=False)
        first = compiled(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            second = compiled(x + 1)
        assert torch.equal(first, low(x)) and torch.equal(second, low(x + 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_forward_traces_without_branches_on_data(bits: int, dtype: torch.dtype) -> None:
    low = cpu_linear("o", solve(weight_of(), bits, 64), torch.randn(48, dtype=dtype), dtype=dtype)
    x = torch.randn(2, 3, 128, dtype=dtype)
    graph = make_fx(low)(x)
    assert torch.equal(graph(x + 1), low(x + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "error"), [(4, 0.12), (8, 0.02)])
def test_bnb_on_cpu(bits: int, error: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    weight, bias = weight_of(64).to(dtype), torch.randn(64).to(dtype)
    low = bnb_linear("o", weight, bias, bits=bits, group_size=64, dtype=dtype)
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
