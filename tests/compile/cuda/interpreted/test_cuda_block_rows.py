"""Linears of GGUF blocks, under Triton's interpreter or on a GPU: values of the file, errors, and a row's bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from compile.block_linear import BLOCK_TYPES, BlockPart, block_sizes
from compile.cuda.block_linear import BlockRowLinear
from compile.fused_linear import compose
from compile.linear import NotFinite
from sharesd.models.decoder import RMSNorm
from tests.helpers.block_parts import random_part, reordered
from tests.helpers.block_parts import values as block_values

EPSILON = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
QUICK = ("Q8_0", "Q4_K", "Q6_K", "INT4_128", "INT8_32", "NVFP4_16")
EACH_TYPE = pytest.mark.parametrize("type_name", BLOCK_TYPES)
EACH_LAYOUT = pytest.mark.parametrize(
    "type_name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in BLOCK_TYPES]
)
"""Types that differ in more than how codes are decoded, which `test_values_are_those_of_the_file` sees for all."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def linear_of(parts: list[BlockPart], *, bias: Tensor | None = None, max_rows: int = 64) -> BlockRowLinear:
    return BlockRowLinear(parts, bias, torch.get_default_device(), max_rows)


def part_of(name: str, N: int, K: int, seed: int = 0) -> BlockPart:
    """Random bytes, of a file: on the host."""
    with torch.device("cpu"):
        return random_part(name, N, K, seed)


def values(part: BlockPart) -> Tensor:
    with torch.device("cpu"):
        weights = block_values(part)
    return weights.to(torch.get_default_device())


def sizes(name: str) -> list[tuple[int, int]]:
    """N and K: the first are split, the others are no whole records or units."""
    inputs, _ = block_sizes(name)
    return [(48, 1024), (37, 256 if inputs > 32 else 176 if inputs == 16 else 160)]


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@EACH_TYPE
def test_values_are_those_of_the_file(type_name: str) -> None:
    for N, K in sizes(type_name):
        part = part_of(type_name, N, K)
        linear = linear_of([part])
        assert torch.equal(linear.unpacked(), values(part))
        ids = torch.tensor([[N - 1, 0], [N // 2, 3]])
        assert torch.equal(linear._decode(ids, torch.float32), values(part)[ids])
        assert torch.equal(linear.full_weight(torch.bfloat16), values(part).bfloat16())


@EACH_LAYOUT
@torch.no_grad()
def test_products(type_name: str) -> None:
    """Against the file's values in float64: what is left is the rounding of float32 sums, and of the outputs."""
    for N, K in sizes(type_name):
        part = part_of(type_name, N, K)
        linear, weight = linear_of([part]), values(part).double()
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
    norm = RMSNorm(256, 1e-5, False, dtype=dtype, device=torch.get_default_device()).requires_grad_(False)
    norm.weight.copy_(0.05 + 0.02 * torch.randn(256))  # float16 holds the products
    wide = RMSNorm(256, 1e-5, False, dtype=torch.float64, device=torch.get_default_device()).requires_grad_(False)
    wide.weight.copy_(norm.weight)
    parts = [part_of("Q4_K", 48, 256), part_of("Q6_K", 40, 256, 1)]
    for used in (parts[:1], parts):
        weight = torch.cat([values(part).double() for part in used])
        bias = torch.randn(len(weight)).to(dtype)
        linear = linear_of(used, bias=bias)
        for gated in ("", "silu"):
            x = 3 * torch.randn(2, 5, 256).to(dtype)
            residual = torch.randn(2, 5, len(weight) // (2 if gated else 1)).to(dtype)
            full = partial(torch.nn.functional.linear, weight=weight, bias=bias.double())
            want = compose(full, x.double(), norm=wide, gated=gated, residual=residual.double())
            got = linear(x, norm=norm, gated=gated, residual=residual)
            assert got.dtype == dtype and error(got, want) < EPSILON[dtype], (len(used), gated)


@EACH_LAYOUT
@torch.no_grad()
def test_a_rows_bits_depend_on_nothing_beside_it(type_name: str) -> None:
    linear = linear_of([part_of(type_name, 40, 512)])
    norm = RMSNorm(512, 1e-5, False, dtype=torch.float32, device=torch.get_default_device()).requires_grad_(False)
    norm.weight.fill_(0.5)
    x = torch.randn(19, 512) * torch.logspace(-3, 3, 19)[:, None]
    whole = linear(x, norm=norm)
    for M in (1, 2, 5, 16, 17):
        assert torch.equal(linear(x[:M], norm=norm), whole[:M]), M
        assert torch.equal(linear(x[-M:], norm=norm), whole[-M:]), M


@torch.no_grad()
def test_parts_of_different_types() -> None:
    K = 256
    parts = [part_of(name, N, K, N) for name, N in (("Q4_K", 24), ("Q4_K", 16), ("Q6_K", 21), ("Q8_0", 8))]
    linear = linear_of(parts)
    assert linear.types == ["Q4_K", "Q6_K", "Q8_0"], "neighbours of one type take one launch"
    assert torch.equal(linear.unpacked(), torch.cat([values(part) for part in parts]))
    x = torch.randn(3, K)
    assert torch.equal(linear(x), torch.cat([linear_of([part])(x) for part in parts], 1))


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
    weight = torch.cat([values(part) if part is blocks else part.raw.float().to(device) for part in parts])
    bias, norm = torch.randn(80), RMSNorm(K, 1e-5, False, dtype=torch.float32, device=weight.device)
    norm.requires_grad_(False).weight.fill_(0.5)
    linear = BlockRowLinear(parts, bias, weight.device, 64, dtype=torch.float32)
    assert linear.types == ["F32", "Q8_0", "F32"] and torch.equal(linear.unpacked(), weight)
    full = partial(F.linear, weight=weight.double(), bias=bias.double())
    for M in (1, 5, 65):
        x = torch.randn(M, K)
        for gated in ("", "silu"):
            residual = torch.randn(M, 40 if gated else 80)
            got = linear(x, norm=norm, gated=gated, residual=residual)
            wanted = compose(full, x.double(), norm=norm.double(), gated=gated, residual=residual.double())
            norm.float()
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
    linear, plain = linear_of(parts), linear_of([part._replace(order=None) for part in parts])
    weight, order = torch.cat([values(part) for part in parts]), linear.order
    assert order is not None and torch.equal(linear.unpacked(), weight)
    one = linear_of(parts[:1])
    ids = torch.tensor([[31, 0], [16, 3]])
    assert torch.equal(one._decode(ids, torch.float32), values(parts[0])[ids])
    norm = RMSNorm(256, 1e-5, False, dtype=torch.float32, device=torch.get_default_device()).requires_grad_(False)
    norm.weight.copy_(torch.rand(256))
    for M in (1, 5, 65):
        x = torch.randn(M, 256)
        assert torch.equal(linear(x), plain(x[:, order]))
        wanted = compose(partial(F.linear, weight=weight), x, norm=norm, gated="silu")
        assert error(linear(x, norm=norm, gated="silu"), wanted) < EPSILON[torch.float32]
    with pytest.raises(ValueError, match="parts of a linear have their inputs in different orders"):
        linear_of([parts[0], parts[1]._replace(order=None)])


def test_memory_is_hardly_more_than_the_files() -> None:
    for name in BLOCK_TYPES:
        part = part_of(name, 32, 2048)
        assert linear_of([part]).nbytes <= 1.07 * part.raw.nbytes, name


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="type IQ1_S does not run as stored; types that do: Q8_0, Q4_K"):
        linear_of([part_of("IQ1_S", 16, 256)])
    with pytest.raises(ValueError, match="a Q8_0 part has 512 inputs, the linear 256"):
        linear_of([part_of("Q4_K", 16, 256), part_of("Q8_0", 16, 512)])
