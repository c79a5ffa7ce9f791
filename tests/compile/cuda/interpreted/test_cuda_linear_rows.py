"""The row-invariant linears, also of blocks, under Triton's interpreter or on a GPU: bits, errors, decoders, tiles."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed here")

from compile.block_linear import BLOCK_TYPES, BlockPart, block_sizes
from compile.cuda import gemm_config
from compile.cuda.autotune import WeightShape, candidates, tune
from compile.cuda.block_linear import BlockRowLinear
from compile.cuda.gemm import multiply
from compile.cuda.gemm_config import Tile
from compile.cuda.linear import RowLinear, replace_with_row_linears
from compile.cuda.lowbit import QuantizedRowLinear
from compile.fused_linear import compose
from compile.linear import NotFinite, pack_linears
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder import Decoder
from sharesd.models.layers import RMSNorm
from tests.helpers.block_parts import random_part, reordered, values

EPSILON = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
ROWS = (1, 7, 17, 33)
slow = partial(pytest.param, marks=pytest.mark.slow)
IN_ALL = pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16), slow(torch.float16)])
QUICK = ("Q8_0", "Q4_K", "Q6_K", "INT4_128", "INT8_32", "NVFP4_16")
EACH_TYPE = pytest.mark.parametrize("type_name", BLOCK_TYPES)
EACH_LAYOUT = pytest.mark.parametrize(
    "type_name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in BLOCK_TYPES]
)
"""Types that differ in more than how codes are decoded, which `test_values_are_those_of_the_file` sees for all."""


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
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


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
            wide, wide_norm = copy.deepcopy(linear).double(), copy.deepcopy(norm).double()
            for used, wide_used in ((None, None), (norm, wide_norm)):
                want = compose(wide, x_MK.double(), norm=wide_used, gated=gated, residual=residual.double())
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
        wide = linear_of(40, inputs, bias=True, dtype=torch.float64)
        wide.load_state_dict({"weight": linear.full_weight(torch.float32), "bias": linear.bias})
        want = compose(wide, x_MK.double(), norm=copy.deepcopy(norm).double(), gated="silu")
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
        assert replace_with_row_linears(plain, 64) == 9 and pack_linears(plain) == 0
        assert error(plain(tokens, plain.new_cache(1, 64)), want) < 1e-5, hf


def test_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tuner measures to be fastest is what later calls use, on this device, for this shape."""
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path))
    shape, on = WeightShape(96, 256, 4, 64), gemm_config.device(gpu())
    slow_first = iter(range(100, 0, -1))
    found = tune([shape], torch.get_default_device(), measure=lambda calls: float(next(slow_first)))
    assert list(found[shape]) == candidates(shape, on)
    kept = gemm_config.read_tiles(gemm_config.own_file(on.name))
    assert kept == {shape.key: candidates(shape, on)[-1]}


def block_linear_of(parts: list[BlockPart], *, bias: Tensor | None = None) -> BlockRowLinear:
    return BlockRowLinear(parts, bias, torch.get_default_device(), 64)


def part_of(name: str, N: int, K: int, seed: int = 0) -> BlockPart:
    """Random bytes, of a file: on the host."""
    with torch.device("cpu"):
        return random_part(name, N, K, seed)


def values_of(part: BlockPart) -> Tensor:
    with torch.device("cpu"):
        weights = values(part)
    return weights.to(torch.get_default_device())


def sizes(name: str) -> list[tuple[int, int]]:
    """N and K: the first are split, the others are no whole records or units."""
    inputs, _ = block_sizes(name)
    return [(48, 1024), (37, 256 if inputs > 32 else 176 if inputs == 16 else 160)]


@EACH_TYPE
def test_values_are_those_of_the_file(type_name: str) -> None:
    """In hardly more memory than that of the file."""
    for N, K in sizes(type_name):
        part = part_of(type_name, N, K)
        linear = block_linear_of([part])
        assert torch.equal(linear.unpacked(), values_of(part))
        ids = torch.tensor([[N - 1, 0], [N // 2, 3]])
        assert torch.equal(linear._decode(ids, torch.float32), values_of(part)[ids])
        assert torch.equal(linear.full_weight(torch.bfloat16), values_of(part).bfloat16())
    part = part_of(type_name, 32, 2048)
    assert block_linear_of([part]).nbytes <= 1.07 * part.raw.nbytes


@EACH_LAYOUT
@torch.no_grad()
def test_products(type_name: str) -> None:
    """Against the file's values in float64: what is left is the rounding of float32 sums, and of the outputs."""
    for N, K in sizes(type_name):
        part = part_of(type_name, N, K)
        linear, weight = block_linear_of([part]), values_of(part).double()
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(3, K).to(dtype)
            want = x.double() @ weight.T
            assert error(linear(x), want) < (4e-7 if dtype == torch.float32 else 2.5e-3), (N, K, dtype)
        assert not linear.counters.any()
    prompt = torch.randn(65, K).bfloat16()
    assert error(linear(prompt), prompt.double() @ weight.T) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@torch.no_grad()
def test_norm_gate_and_residual(dtype: torch.dtype) -> None:
    norm = norm_of(256, gemma=False, dtype=dtype)
    norm.weight.copy_(0.05 + 0.02 * torch.randn(256))  # float16 holds the products
    wide = copy.deepcopy(norm).double()
    parts = [part_of("Q4_K", 48, 256), part_of("Q6_K", 40, 256, 1)]
    for used in (parts[:1], parts):
        weight = torch.cat([values_of(part).double() for part in used])
        bias = torch.randn(len(weight)).to(dtype)
        linear = block_linear_of(used, bias=bias)
        for gated in ("", "silu"):
            x = 3 * torch.randn(2, 5, 256).to(dtype)
            residual = torch.randn(2, 5, len(weight) // (2 if gated else 1)).to(dtype)
            full = partial(F.linear, weight=weight, bias=bias.double())
            want = compose(full, x.double(), norm=wide, gated=gated, residual=residual.double())
            got = linear(x, norm=norm, gated=gated, residual=residual)
            assert got.dtype == dtype and error(got, want) < EPSILON[dtype], (len(used), gated)


@EACH_LAYOUT
@torch.no_grad()
def test_a_rows_bits_depend_on_nothing_beside_it(type_name: str) -> None:
    linear = block_linear_of([part_of(type_name, 40, 512)])
    norm = norm_of(512, gemma=False, dtype=torch.float32)
    x = torch.randn(19, 512) * torch.logspace(-3, 3, 19)[:, None]
    whole = linear(x, norm=norm)
    for M in (1, 2, 5, 16, 17):
        assert torch.equal(linear(x[:M], norm=norm), whole[:M]), M
        assert torch.equal(linear(x[-M:], norm=norm), whole[-M:]), M


@torch.no_grad()
def test_parts_of_different_types() -> None:
    K = 256
    parts = [part_of(name, N, K, N) for name, N in (("Q4_K", 24), ("Q4_K", 16), ("Q6_K", 21), ("Q8_0", 8))]
    linear = block_linear_of(parts)
    assert linear.types == ["Q4_K", "Q6_K", "Q8_0"], "neighbours of one type take one launch"
    assert torch.equal(linear.unpacked(), torch.cat([values_of(part) for part in parts]))
    x = torch.randn(3, K)
    assert torch.equal(linear(x), torch.cat([block_linear_of([part])(x) for part in parts], 1))


@torch.no_grad()
@pytest.mark.parametrize("is_reordered", [False, True])
def test_numbers_next_to_blocks(is_reordered: bool) -> None:
    """Gates, residuals, few rows and prompts; numbers of each type have the dtype of the model."""
    K = 256
    with torch.device("cpu"):
        blocks = random_part("Q8_0", 40, K)
        blocks = reordered(blocks) if is_reordered else blocks
        rows = [0.1 * torch.randn(N, K) for N in (24, 16)]
    parts = [BlockPart("F16", rows[0].half()), blocks, BlockPart("BF16", rows[1].bfloat16())]
    device = torch.get_default_device()
    weight = torch.cat([values_of(part) if part is blocks else part.raw.float().to(device) for part in parts])
    bias, norm = torch.randn(80), norm_of(K, gemma=False, dtype=torch.float32)
    wide = copy.deepcopy(norm).double()
    linear = BlockRowLinear(parts, bias, weight.device, 64, dtype=torch.float32)
    assert linear.types == ["F32", "Q8_0", "F32"] and torch.equal(linear.unpacked(), weight)
    full = partial(F.linear, weight=weight.double(), bias=bias.double())
    for M in (1, 5, 65):
        x = torch.randn(M, K)
        for gated in ("", "silu"):
            residual = torch.randn(M, 40 if gated else 80)
            got = linear(x, norm=norm, gated=gated, residual=residual)
            wanted = compose(full, x.double(), norm=wide, gated=gated, residual=residual.double())
            assert error(got, wanted) < EPSILON[torch.float32], (M, gated)
    assert torch.equal(linear(x[:3]), torch.cat([linear(x[i : i + 1]) for i in range(3)]))
    assert not linear.counters.any()
    rounded = BlockRowLinear(parts, None, weight.device, 64)
    assert rounded.types == ["BF16", "Q8_0", "BF16"] and rounded.nbytes == linear.nbytes - 40 * K * 2
    parts[0].raw[0, 0] = float("inf")
    with pytest.raises(NotFinite):
        BlockRowLinear(parts, None, weight.device, 64)


@torch.no_grad()
def test_inputs_in_another_order() -> None:
    """Few rows and prompts have the bits of inputs that were put in order before."""
    with torch.device("cpu"):
        parts = [reordered(part_of(name, 32, 256)) for name in ("INT4_64", "Q8_0")]
    linear, plain = block_linear_of(parts), block_linear_of([part._replace(order=None) for part in parts])
    weight, order = torch.cat([values_of(part) for part in parts]), linear.order
    assert order is not None and torch.equal(linear.unpacked(), weight)
    one = block_linear_of(parts[:1])
    ids = torch.tensor([[31, 0], [16, 3]])
    assert torch.equal(one._decode(ids, torch.float32), values_of(parts[0])[ids])
    norm = norm_of(256, gemma=False, dtype=torch.float32)
    norm.weight.copy_(torch.rand(256))
    for M in (1, 5, 65):
        x = torch.randn(M, 256)
        assert torch.equal(linear(x), plain(x[:, order]))
        wanted = compose(partial(F.linear, weight=weight), x, norm=norm, gated="silu")
        assert error(linear(x, norm=norm, gated="silu"), wanted) < EPSILON[torch.float32]
    with pytest.raises(ValueError, match="parts of a linear have their inputs in different orders"):
        block_linear_of([parts[0], parts[1]._replace(order=None)])


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="type IQ1_S does not run as stored; types that do: Q8_0, Q4_K"):
        block_linear_of([part_of("IQ1_S", 16, 256)])
    with pytest.raises(ValueError, match="a Q8_0 part has 512 inputs, the linear 256"):
        block_linear_of([part_of("Q4_K", 16, 256), part_of("Q8_0", 16, 512)])
