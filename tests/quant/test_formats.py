"""The registry of quantization formats: what it promises of each, and that a new one needs nothing else."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from quant.config import QuantConfig
from quant.formats import DEFAULT, FORMATS, QuantFormat, load
from quant.formats.hqq.solver import solve
from quant.quantize_model import quantize_linears
from quant.switch_linear import QuantizedLinear
from sharesd.weights.packing import pack_for_cpu
from tests.helpers.paths import ROOT

MADE = {name: form for name, form in FORMATS.items() if not form.keeps_weights}


@pytest.mark.parametrize("form", MADE.values(), ids=MADE)
def test_formats_name_what_there_is(form: QuantFormat) -> None:
    references = [form.check, *form.linears.values(), *([form.solver] if form.solver else [])]
    assert all(callable(load(reference)) for reference in references)
    assert {*form.acceptance} == {*form.tree_misses} == {*form.bits} >= {*form.planned_bits, *form.cached_bits}
    assert all(0 < chance < 1 for chance in form.acceptance.values())
    for bits in form.bits:
        assert form.group(512, bits, 64) == (512 if bits in form.row_bits else 64)
        assert form.logit_noise(bits) > 0
    assert next(iter(FORMATS)) == DEFAULT == QuantConfig().method


@pytest.mark.parametrize("shape", [(48, 128), (40, 256)])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_bytes_are_those_of_the_packed_linear(bits: int, shape: tuple[int, int]) -> None:
    solved = solve(torch.randn(shape), bits, 64)
    assert FORMATS["hqq"].nbytes(*shape, bits, 64) == pack_for_cpu(solved, None).nbytes


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_are_those_of_bitsandbytes(bits: int) -> None:
    weight, form = torch.randn(64, 128, dtype=torch.bfloat16), FORMATS["bnb"]
    linear = form.linear("o", weight, None, bits=bits, group_size=64, dtype=weight.dtype, device=weight.device)
    estimate = form.nbytes(64, 128, bits, 64)  # CPUs with AVX512-BF16 keep maxima of groups as bfloat16
    assert linear.nbytes == estimate if bits == 8 else 0.9 * estimate < linear.nbytes <= estimate


class SignLinear(QuantizedLinear):
    """One bit per weight, times the mean magnitude of its row."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None) -> None:
        super().__init__(bias)
        self.register_buffer("sign", weight_NK.sign().to(torch.int8))
        self.register_buffer("scale", weight_NK.abs().mean(-1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.sign * self.scale, self.bias)


def test_a_new_format_needs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up one, in a module of its own."""
    linear, check = (lambda name, weight, bias, **_: SignLinear(weight, bias)), (lambda *_, **__: None)
    module = SimpleNamespace(linear=linear, check=check)
    monkeypatch.setitem(sys.modules, "sign_format", module)
    sign = QuantFormat(
        name="sign",
        bits=(1,),
        group_sizes=(64,),
        row_bits=(1,),
        acceptance={1: 0.1},
        tree_misses={1: {0: 1.0}},
        nbytes=lambda N, K, bits, group_size: N * K + 4 * N,
        check="sign_format:check",
        linears={"cpu": "sign_format:linear"},
    )
    monkeypatch.setitem(FORMATS, "sign", sign)
    config = QuantConfig.parse("sign:1,head=1")
    with pytest.raises(ValueError, match=re.escape("bits (sign) is 2; choose one of 1")):
        replace(config, bits=2)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(64, 32)]), "head": nn.Linear(32, 64)})
    want = SignLinear(model["layers"][0].weight, model["layers"][0].bias)
    layer_of = {"layers.0": 0}.get
    report = quantize_linears(model, config, head_name="head", layer_of=layer_of)
    x = torch.randn(3, 64)
    assert torch.equal(model["layers"][0](x), want(x)) and isinstance(model["head"], SignLinear)
    assert report.quantized_bytes == sign.nbytes(32, 64, 1, 64) + sign.nbytes(64, 32, 1, 64)
    with pytest.raises(ValueError, match="is on meta, where sign has no kernel; use cpu"):
        sign.check_linear("o", (1, 1), bits=1, group_size=64, dtype=torch.float32, device=torch.device("meta"))


def test_only_formats_name_formats() -> None:
    """Elsewhere the registry is asked: no `method == "hqq"`, no meaning of bits."""
    pattern = re.compile(r"""method\s*(==|!=|in)\s|["'](hqq|bnb)["']""")
    packages = ("sharesd", "quant", "offload", "compile", "benchmark", "serve", "train", "multigpu")
    found = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if "formats" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line) and not line.startswith("PACKAGES")
    ]
    assert found == []
