"""The row-invariant linears, under Triton's interpreter or on a GPU: bits, errors, decoders, tiles."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed here")

from compile.cuda import gemm_config
from compile.cuda.autotune import WeightShape, candidates, tune
from compile.cuda.gemm import multiply
from compile.cuda.gemm_config import Tile
from compile.cuda.linear import RowLinear, replace_with_row_linears
from compile.cuda.lowbit import QuantizedRowLinear
from compile.fused_linear import compose
from compile.linear import pack_linears
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder import Decoder, RMSNorm

EPSILON = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
ROWS = (1, 7, 17, 33)
IN_ALL = pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(half, marks=pytest.mark.slow) for half in (torch.bfloat16, torch.float16))],
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def gpu() -> int | None:
    """Index of the GPU that kernels run on; None under the interpreter."""
    return torch.get_default_device().index


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def norm_of(size: int, *, gemma: bool, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, 1e-5, gemma, dtype=dtype, device=torch.get_default_device()).requires_grad_(False)
    norm.weight.copy_(1 + 0.3 * torch.randn(size))
    return norm


def linear_of(outputs: int, inputs: int, *, bias: bool, dtype: torch.dtype) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    return linear.to(dtype)


def low_of(outputs: int, inputs: int, bits: int, group: int, dtype: torch.dtype) -> QuantizedRowLinear:
    codes_NK = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    scale_NG = (0.5 + torch.rand(outputs, inputs // group)) / 16 / 2**bits
    offset_NG = torch.zeros_like(scale_NG) if bits == 8 else scale_NG * torch.randn_like(scale_NG)
    return QuantizedRowLinear(codes_NK, scale_NG, offset_NG, random(outputs, dtype=dtype), bits, dtype, 64)


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def check_bits(call, x_MK: Tensor, residual: Tensor | None = None) -> None:  # type: ignore[no-untyped-def]
    """Rows have the same bits alone, among others, in another order and at another place."""

    def run(rows: Tensor) -> Tensor:
        return call(x_MK[rows], residual=None if residual is None else residual[rows])

    every = torch.arange(len(x_MK))
    whole = run(every)
    for num in ROWS:
        first = int(torch.randint(0, len(x_MK) - num + 1, ()))
        assert torch.equal(run(every[first : first + num]), whole[first : first + num]), num
    order = torch.randperm(len(x_MK))
    assert torch.equal(run(order), whole[order])
    extreme = x_MK.clone()
    extreme[1::2] = torch.finfo(torch.float16).max  # neighbours, however large, change nothing
    assert torch.equal(call(extreme, residual=residual)[::2], whole[::2])


@IN_ALL
@torch.no_grad()
def test_full_weights(dtype: torch.dtype) -> None:
    """Every variant against the modules in float64, and bits."""
    for outputs, inputs in ((50, 176), (40, 1024)):  # the first fits no tile, the second is split
        for gated, gemma in (("", False), ("silu", True), ("gelu", False), ("gelu_pytorch_tanh", False)):
            linear = linear_of(outputs, inputs, bias=not gemma, dtype=dtype)
            row = RowLinear(linear, 64)
            norm = norm_of(inputs, gemma=gemma, dtype=dtype)
            x_MK = 3 * random(64, inputs, dtype=dtype)
            residual = random(64, outputs // 2 if gated else outputs, dtype=dtype)
            for used in (None, norm):
                wide_norm = None if used is None else norm_of(inputs, gemma=gemma, dtype=torch.float64)
                if wide_norm is not None:
                    wide_norm.weight.copy_(norm.weight)
                wide = linear_of(outputs, inputs, bias=not gemma, dtype=torch.float64)
                wide.load_state_dict(linear.state_dict())
                want = compose(wide, x_MK.double(), norm=wide_norm, gated=gated, residual=residual.double())
                got = row(x_MK[:20], norm=used, gated=gated, residual=residual[:20])
                assert got.dtype == dtype and error(got, want[:20]) < EPSILON[dtype], (outputs, dtype, gated, used)
            if gated in ("", "silu"):
                check_bits(partial(row, norm=norm, gated=gated), x_MK, residual)
            assert not row.counters.any()
    assert gemm_config.tile_of(gpu(), 40, 1024, 16).split > 1, "no shape is split"


@IN_ALL
@torch.no_grad()
def test_low_bits(dtype: torch.dtype) -> None:
    """Low bits against the dequantized weights, and bits."""
    for bits, group in ((4, 32), (4, 64), (4, 128), (8, 0)):
        inputs = 384 if bits == 4 else 208
        linear = low_of(40, inputs, bits, group or inputs, dtype)
        norm = norm_of(inputs, gemma=False, dtype=dtype)
        x_MK = random(64, inputs, dtype=dtype)
        wide_norm = norm_of(inputs, gemma=False, dtype=torch.float64)
        wide_norm.weight.copy_(norm.weight)
        wide = linear_of(40, inputs, bias=True, dtype=torch.float64)
        wide.load_state_dict({"weight": linear.full_weight(torch.float32), "bias": linear.bias})
        want = compose(wide, x_MK.double(), norm=wide_norm, gated="silu")
        assert error(linear(x_MK, norm=norm, gated="silu"), want) < 1.5 * EPSILON[dtype], (dtype, bits, group)
        check_bits(partial(linear, norm=norm), x_MK, random(64, 40, dtype=dtype))
        prompt = random(65, inputs, dtype=dtype)
        assert error(linear(prompt), wide(prompt.double())) < 2e-2


def test_tiles() -> None:
    """Any tile, split or not, gives the product, and leaves the counters as they were."""
    weight, x_MK, counters = random(70, 416), random(17, 416), torch.zeros(64, dtype=torch.int32)
    want = x_MK.double() @ weight.double().t()
    sizes = ((32, 64), (32, 128), (32, 256), (64, 64), (64, 128))
    for (rows, inputs), split in itertools.product(sizes, (1, 2, 3, 4)):
        tile = Tile(rows, inputs, split, 2, 4)  # of 32 bits no more fits every GPU
        for _ in range(2):
            assert error(multiply(x_MK, weight, tile, counters=counters), want) < EPSILON[torch.float32], tile
        assert not counters.any()


@torch.no_grad()
def test_decoders() -> None:
    """Whole decoders in steps of several widths: the logits of plain modules, and a row's bits whatever the width."""
    common = {"vocab_size": 80, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    gemma = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    for hf in ({"model_type": "llama"}, {"model_type": "qwen2"}, {"model_type": "gemma2", **gemma}):
        config = config_from_hf({**common, **hf})
        plain = Decoder(config, device=torch.get_default_device()).requires_grad_(False)
        for parameter in plain.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
        tokens = torch.randint(0, 80, (1, 8))
        want = plain(tokens, plain.new_cache(1, 64))
        replaced = replace_with_row_linears(plain, 64)
        assert replaced == 9 and pack_linears(plain) == 0
        got = plain(tokens, plain.new_cache(1, 64))
        assert error(got, want) < 1e-5, hf


def test_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tuner measures to be fastest is what later calls use, on this device, for this shape."""
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path))
    shape, on = WeightShape(96, 256, 4, 64), gemm_config.device(gpu())
    slow_first = iter(range(100, 0, -1))
    found = tune([shape], torch.get_default_device(), measure=lambda calls: float(next(slow_first)))
    assert list(found[shape]) == candidates(shape, on)
    kept = gemm_config.read_tiles(gemm_config.own_file(on.name))
    assert kept == {shape.key: candidates(shape, on)[-1]}
