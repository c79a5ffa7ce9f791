"""Linears of GGUF blocks: values of the file, and rows whose bits depend on nothing beside them.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor, nn

from compile.block_linear import (
    BLOCK_TYPES,
    NUMBERS,
    Activations,
    BlockEmbedding,
    BlockLinear,
    BlockPart,
    block_sizes,
)
from compile.linear import NotFinite
from sharesd.models.decoder import Decoder
from tests.helpers.block_parts import ggml_type, is_of_folders, random_part, reordered, values
from tests.helpers.compiled import compiled
from tests.helpers.oracle import tiny_decoder

EACH_TYPE = pytest.mark.parametrize("type_name", BLOCK_TYPES)
EACH_KIND = pytest.mark.parametrize("activations", ["exact", "fast"])
ROUNDING = {"exact": (32639, 3e-5), "fast": (127, 1e-2)}
"""The largest code of an activation, and what rounding costs of a row's norm."""


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def sizes(name: str) -> list[tuple[int, int]]:
    """N and K: whole records, some outputs of one, and inputs that end within a unit."""
    inputs, _ = block_sizes(name)
    odd = [(40, 592), (7, 144), (3, 16)] if inputs == 16 else [(40, 576), (7, 96), (3, 32)]
    return [(32, 512), (40, 768), (7, 256)] if inputs > 32 else [(32, 512), *odd]


@EACH_TYPE
def test_values_are_those_of_the_file(type_name: str) -> None:
    for N, K in sizes(type_name):
        part = random_part(type_name, N, K)
        linear = BlockLinear([part], None, K)
        assert torch.equal(linear.dequantize(slice(None)), values(part))
        rows = torch.tensor([N - 1, 0, N // 2])
        assert torch.equal(linear.dequantize(rows), values(part)[rows])


@pytest.mark.parametrize("type_name", [name for name in BLOCK_TYPES if not is_of_folders(name)])
def test_quantized_weights_keep_their_values(type_name: str) -> None:
    """Blocks by the quantizer of the gguf package, of those types for which it has one."""
    try:
        raw = gguf.quantize(random(24, 512).numpy(), ggml_type(type_name))
    except NotImplementedError:
        raw = random_part(type_name, 24, 512).raw.numpy()
    part = BlockPart(type_name, torch.from_numpy(raw))
    assert torch.equal(BlockLinear([part], None, 512).dequantize(slice(3, 20)), values(part)[3:20])


def test_types_of_folders_follow_those_of_ggml() -> None:
    """Names of GGML are those of its blocks."""
    assert [is_of_folders(name) for name in BLOCK_TYPES] == sorted(is_of_folders(name) for name in BLOCK_TYPES)
    assert not is_of_folders(BLOCK_TYPES[0]) and is_of_folders(BLOCK_TYPES[-1])


def test_small_floats_are_exact_where_tiny_numbers_are_flushed() -> None:
    part = random_part("NVFP4_16", 16, 4096)
    part.raw[0].view(-1, 13)[:, 4] = torch.arange(256).clamp(max=254) - (torch.arange(256) == 127).int()
    linear, wanted = BlockLinear([part], None, 4096), values(part)
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(linear.dequantize(slice(None)), wanted)
    finally:
        torch.set_flush_denormal(False)


@EACH_TYPE
def test_memory_is_hardly_more_than_the_files(type_name: str) -> None:
    part = random_part(type_name, 32, 2048)
    assert BlockLinear([part], None, 2048).nbytes <= 1.15 * part.raw.nbytes


def rounded(x: Tensor, activations: Activations) -> Tensor:
    """Activations as integers times a scale for every 32 of them."""
    most, _ = ROUNDING[activations]
    groups = nn.functional.pad(x.float(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    top = groups.abs().amax(2, keepdim=True)
    return ((groups * (most / top)).round().double() * (top / most)).flatten(1)[:, : x.shape[1]]


@EACH_KIND
@EACH_TYPE
def test_products(type_name: str, activations: Activations) -> None:
    for N, K in sizes(type_name):
        part, bias = random_part(type_name, N, K), random(N)
        linear = BlockLinear([part], bias, K, activations=activations)
        weight = values(part).double()
        for M in (1, 2, 3, 9):
            x = random(M, K)
            size = x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
            assert ((rounded(x, activations) - x).norm(dim=1) < ROUNDING[activations][1] * x.norm(dim=1)).all()
            y = linear(x).double() - bias
            assert ((y - rounded(x, activations) @ weight.T).abs() < 2e-6 * size + 1e-6).all()
            assert ((y - x.double() @ weight.T).abs() < 5 * ROUNDING[activations][1] * size + 1e-6).all()
            linear.bias = bias.bfloat16().float()
            wanted = linear(x.bfloat16().float()).bfloat16()
            linear.bias = linear.bias.bfloat16()
            assert torch.equal(linear(x.bfloat16()), wanted)
            linear.bias = bias


@EACH_KIND
@EACH_TYPE
def test_a_rows_bits_depend_on_nothing_beside_it(type_name: str, activations: Activations) -> None:
    N, K = 88, 768
    linear = BlockLinear([random_part(type_name, N, K)], None, K, activations=activations)
    x = random(71, K) * torch.logspace(-3, 3, 71)[:, None]
    one_by_one = torch.cat([linear(row[None]) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for M in (*range(1, 17), 35, 64, 71):
            assert torch.equal(linear(x[-M:]), one_by_one[-M:])
            assert torch.equal(linear(x[:M]), one_by_one[:M])


@EACH_KIND
def test_parts_of_different_types(activations: Activations) -> None:
    K = 512
    parts = [
        random_part(name, N, K, seed)
        for seed, (name, N) in enumerate(zip(BLOCK_TYPES, (48, 16, 32, 64) * 9, strict=False))
    ]
    parts.append(random_part("Q6_K", 21, K))
    merged = BlockLinear(parts, None, K, activations=activations)
    alone = [BlockLinear([part], None, K, activations=activations) for part in parts]
    assert merged.out_features == sum(len(part.raw) for part in parts)
    assert torch.equal(merged.dequantize(slice(None)), torch.cat([values(part) for part in parts]))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for M in (1, 5):
            x = random(M, K)
            assert torch.equal(merged(x), torch.cat([linear(x) for linear in alone], 1))


@EACH_KIND
@pytest.mark.parametrize("type_name", ["Q4_0", "Q8_0", "INT4_64", "INT8_128", "Q6_K"])
def test_inputs_in_another_order(type_name: str, activations: Activations) -> None:
    """The same bits as of inputs that were put in order before."""
    parts = [reordered(random_part(type_name, N, 768, N)) for N in (48, 40)]
    order = parts[0].order
    linear = BlockLinear(parts, random(88), 768, activations=activations)
    plain = BlockLinear([part._replace(order=None) for part in parts], linear.bias, 768, activations=activations)
    weight = torch.cat([values(part) for part in parts])
    assert torch.equal(linear.unpacked(), weight) and not torch.equal(plain.unpacked(), weight)
    assert torch.equal(parts[0].numbers(), weight[:48])
    x = random(71, 768) * torch.logspace(-3, 3, 71)[:, None]
    wanted = plain(x[:, order])
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for M in (*range(1, 17), 71):
            assert torch.equal(linear(x[:M]), wanted[:M]) and torch.equal(linear(x[-M:]), wanted[-M:])
    assert torch.equal(linear(x[:3].bfloat16().float()), plain(x[:3].bfloat16().float()[:, order]))
    if linear.has_halves:
        upper = linear.upper_halves()
        assert torch.equal(upper(x), plain.upper_halves()(x[:, order]))
        assert not torch.equal(upper.unpacked(), weight)


def upper_values(part: BlockPart) -> Tensor:
    """Codes of Q8_0 at the middles of 16 cells, of which one is around zero if all codes of the block fit."""
    blocks = part.raw.unflatten(1, (-1, 34))
    scale, codes = blocks[..., :2].contiguous().view(torch.float16).double(), blocks[..., 2:].view(torch.int8).double()
    top, bottom = codes.amax(2, keepdim=True), codes.amin(2, keepdim=True)
    up, down = 16 * (codes / 16 + 0.5).floor(), 16 * (codes / 16 - 0.5).ceil()
    either = torch.where(top <= 119, up, torch.where(bottom >= -119, down, 16 * (codes / 16).floor() + 8))
    return (scale * either).flatten(1)


def q8_part(N: int, K: int) -> BlockPart:
    """Blocks of a quantizer and random ones, whose codes reach both ends."""
    raw = torch.from_numpy(gguf.quantize(random(N, K).numpy(), ggml_type("Q8_0")))
    raw[::3] = random_part("Q8_0", N, K).raw[::3]
    return BlockPart("Q8_0", raw)


def test_upper_halves_are_numbers_of_the_same_memory() -> None:
    for N, K in sizes("Q8_0"):
        part, bias = q8_part(N, K), random(N)
        linear = BlockLinear([part], bias, K)
        upper = linear.upper_halves()
        assert linear.has_halves and upper.weight.data_ptr() == linear.weight.data_ptr()
        weight = upper_values(part)
        assert torch.equal(upper.dequantize(slice(None)).double(), weight)
        for M in (1, 2, 3, 9):
            x = random(M, K)
            size = x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
            assert ((upper(x).double() - bias - rounded(x, "fast") @ weight.T).abs() < 2e-6 * size + 1e-6).all()
        assert torch.equal(linear.dequantize(slice(None)), values(part))


def test_a_rows_bits_of_upper_halves_depend_on_nothing_beside_it() -> None:
    upper = BlockLinear([q8_part(72, 576), random_part("Q4_0", 16, 576)][::-1], None, 576).upper_halves()
    x = random(16, 576) * torch.logspace(-3, 3, 16)[:, None]
    one_by_one = torch.cat([upper(row[None]) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for M in range(1, 17):
            assert torch.equal(upper(x[-M:]), one_by_one[-M:])


def test_scales_that_leave_no_bit_free_are_not_split() -> None:
    part = q8_part(32, 512)
    part.raw[5, :2] = torch.tensor([2.0], dtype=torch.float16).view(torch.uint8)
    linear = BlockLinear([part, q8_part(16, 512)], None, 512)
    assert torch.equal(linear.dequantize(slice(32)), values(part))
    upper = linear.upper_halves()
    assert torch.equal(upper.dequantize(slice(32)), values(part))
    assert not torch.equal(upper.dequantize(slice(32, 48)), linear.dequantize(slice(32, 48)))
    assert not BlockLinear([part, random_part("Q4_0", 16, 512)], None, 512).has_halves


def test_rows_may_lie_apart() -> None:
    part = random_part("Q4_K", 32, 512)
    apart = torch.zeros(32, part.raw.shape[1] + 5, dtype=torch.uint8)
    apart[:, 3:-2] = part.raw
    assert torch.equal(
        BlockLinear([BlockPart("Q4_K", apart[:, 3:-2])], None, 512).dequantize(slice(None)), values(part)
    )


@pytest.mark.parametrize("activations", ["exact", "fast"])
def test_odd_rows(activations: Activations) -> None:
    """Zeros give zeros; a row that is not finite gives none that is, and leaves others alone."""
    linear = BlockLinear([random_part("Q8_0", 32, 512)], None, 512, activations=activations)
    x = random(4, 512)
    wanted = linear(x)
    x[1] = 0
    x[2, 100], x[3, 7] = float("nan"), float("inf")
    y = linear(x)
    assert torch.equal(y[0], wanted[0]) and not y[1].any() and not y[2:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embeddings(dtype: torch.dtype) -> None:
    part = random_part("Q6_K", 70, 512)
    head = BlockLinear([part], None, 512)
    ids = torch.tensor([[3, 69, 0], [64, 64, 15]])
    for is_head in (True, False):
        embedding = BlockEmbedding(head, dtype, is_head=is_head)
        assert torch.equal(embedding(ids), values(part).to(dtype)[ids])
        with pytest.raises(IndexError, match="rows 3 to 70 of 70"):
            embedding(torch.tensor([3, 70]))
        assert embedding.linear is head and len(list(embedding.buffers())) == (0 if is_head else 2)


def test_operators_of_compiled_code() -> None:
    """Inductor calls them, and takes shapes from those without numbers."""
    linear, x, rows = (
        BlockLinear([random_part("Q4_K", 40, 256)], random(40), 256),
        random(2, 3, 256),
        torch.tensor([[7]]),
    )
    tensors = linear.weight, linear.table, linear.bias
    multiply, decode = torch.ops.sharesd.block_linear, torch.ops.sharesd.decode_rows
    assert torch.equal(multiply(x, *tensors, 40), linear(x))
    assert torch.equal(decode(rows, *tensors[:2], 40, 256, torch.bfloat16), linear.dequantize(rows).bfloat16())
    shape = multiply(x.to("meta"), *(tensor.to("meta") for tensor in tensors), 40)
    assert (shape.shape, shape.dtype) == ((2, 3, 40), torch.float32)
    shape = decode(rows.to("meta"), *(tensor.to("meta") for tensor in tensors[:2]), 40, 256, torch.bfloat16)
    assert (shape.shape, shape.dtype) == ((1, 1, 256), torch.bfloat16)


@EACH_KIND
@pytest.mark.parametrize("is_reordered", [False, True])
def test_numbers_next_to_blocks_keep_their_values(is_reordered: bool, activations: Activations) -> None:
    """Parts of one type that end within a record become one; numbers are put into the order of the blocks."""
    for K in (96, 512):
        blocks = [random_part("Q8_0", N, K, N) for N in (24, 24)]
        blocks = [part._replace(order=reordered(blocks[0]).order) for part in blocks] if is_reordered else blocks
        numbers = [
            BlockPart(kind, random(N, K).to(dtype))
            for (kind, dtype), N in zip(NUMBERS.items(), (16, 32, 41), strict=True)
        ]
        linear = BlockLinear([*blocks, *numbers], None, K, activations=activations)
        weight = torch.cat([*map(values, blocks), *(part.raw.float() for part in numbers)])
        assert torch.equal(linear.unpacked(), weight)
        x = random(21, K)
        whole, wanted = linear(x), x.double() @ weight.double().T
        assert (whole - wanted).norm() < ROUNDING[activations][1] * wanted.norm()
        for M in (1, 2, 3, 16):
            assert torch.equal(linear(x[:M]), whole[:M]) and torch.equal(linear(x[-M:]), whole[-M:])
    numbers[0].raw[3, 5] = float("nan")
    with pytest.raises(NotFinite):
        BlockLinear([*blocks, *numbers], None, K)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([("Q8_0", 8, 256), ("Q4_0", 16, 256)], "begins at output 8, which is not a multiple of 16"),
        ([("Q8_0", 16, 512)], "a Q8_0 part has 512 inputs, the linear 256"),
        ([("IQ1_S", 16, 256)], "type IQ1_S does not run as stored; types that do: Q8_0, Q4_K"),
        ([], "a linear without outputs"),
    ],
)
def test_what_is_refused(parts: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockLinear([random_part(*part) for part in parts], None, 256)
    with pytest.raises(ValueError, match=r"Q4_K weights of torch.uint8 \[2, 145\] are not rows of blocks"):
        BlockLinear([BlockPart("Q4_K", torch.zeros(2, 145, dtype=torch.uint8))], None, 256)


def test_orders_that_are_refused() -> None:
    part = reordered(random_part("Q8_0", 16, 256))
    assert part.order is not None
    for other in (None, part.order.flip(0)):
        with pytest.raises(ValueError, match="parts of a linear have their inputs in different orders"):
            BlockLinear([part, part._replace(order=other)], None, 256)
    for order in (part.order[:-1], part.order.long(), part.order.clamp(min=1)):
        with pytest.raises(ValueError, match=r"is not int32 \[256\]"):
            BlockLinear([part._replace(order=order)], None, 256)


def block_model(dtype: torch.dtype, activations: Activations) -> Decoder:
    """A decoder with blocks of several types in each of its linears, in the second layer in another order."""
    model = tiny_decoder(2, dtype=dtype, hidden_size=64, intermediate_size=96, num_attention_heads=4)

    def with_blocks(linear: nn.Linear, first: int) -> BlockLinear:
        types = ["Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1"]
        pieces = linear.weight.float().split(linear.out_features // 2 // 16 * 16)
        raws = [gguf.quantize(piece.numpy(), ggml_type(types[(first + i) % 5])) for i, piece in enumerate(pieces)]
        parts = [BlockPart(types[(first + i) % 5], torch.from_numpy(raw)) for i, raw in enumerate(raws)]
        if first:
            parts = [reordered(part) for part in parts]
        return BlockLinear(parts, linear.bias, linear.in_features, activations=activations)

    for number, block in enumerate(model.blocks):
        for module, names in ((block.attn, ("qkv", "o")), (block.mlp, ("gate_up", "down"))):
            for i, name in enumerate(names):
                setattr(module, name, with_blocks(getattr(module, name), number + i))
    return model


@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stack_step_equals_the_composed_one(dtype: torch.dtype, activations: Activations) -> None:
    """Close to it; its rows have the same bits whatever is beside them."""
    model = block_model(dtype, activations)
    tokens = torch.randint(0, 40, (1, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = model.forward(tokens, model.new_cache(1, 64))
        stack = compiled(model, "native")
        together = stack.forward(tokens, stack.new_cache(1, 64))
        tolerance = 1e-4 if (dtype, activations) == (torch.float32, "exact") else 0.05
        assert (together - wanted).double().norm() < tolerance * wanted.double().norm()
        for width, threads in ((1, 1), (2, 1), (5, 2), (17, 3)):
            torch.set_num_threads(threads)
            cache, parts = stack.new_cache(1, 64), []
            for i in range(0, 17, width):
                parts.append(stack.forward(tokens[:, i : i + width], cache))
                cache.lengths += width
            assert torch.equal(torch.cat(parts, 1), together)
