"""Linears of GGUF blocks and of bfloat16: values of the file, and rows whose bits depend on nothing next to them.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import shutil
from itertools import product
from math import inf, nan
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compile import block_linear, cpp_extension
from compile.block_linear import BLOCK_TYPES, NUMBERS, Activations, BlockEmbedding, BlockLinear, BlockPart, block_sizes
from compile.block_types import TABLE, TYPES, BlockType, read_table
from compile.cuda.block_form import CODECS, FORMS, BlockForm, is_finite
from compile.huge_pages import HugePageArena
from compile.linear import NotFinite, PackedLinear, WidenedLinear
from compile.native_structs import LinearStruct
from sharesd.models.decoder import Decoder
from tests.helpers.block_parts import HALVES, ggml_type, is_of_folders, random_part, reordered, values
from tests.helpers.compiled import compiled
from tests.helpers.oracle import tiny_decoder

EACH_TYPE = pytest.mark.parametrize("type_name", BLOCK_TYPES)
EACH_KIND = pytest.mark.parametrize("activations", ["exact", "fast"])
ROUNDING = {"exact": (32639, 3e-5), "fast": (127, 1e-2)}
"""The largest code of an activation, and what rounding costs of a row's norm."""
ROW = "BLOCK_TYPE(MADE_UP, 32, 18, 64, 576, GPU(low=4, zero=4), cannot_quantize, MadeUpForm)"
CODEC = """
// Codes of neighbours share a byte, and the scale comes last; w = scale * (code - 4).
struct MadeUpForm : PlainForm<4, 2, false> {
  static void header(const uint8_t* block, int64_t index, int64_t o, uint8_t* to) {
    std::memcpy(to + index * 32 + o * 2, block + 16, 2);
  }
  static void decode(const uint8_t* __restrict block, uint8_t* __restrict codes) {
    for (int i = 0; i < 16; ++i) codes[2 * i] = block[i] & 15, codes[2 * i + 1] = block[i] >> 4;
  }
};
"""


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def sizes(name: str) -> list[tuple[int, int]]:
    """N and K: whole records, some outputs of one, and inputs that end within a unit."""
    inputs, _ = block_sizes(name)
    odd = [(40, 592), (7, 144), (3, 16)] if inputs == 16 else [(40, 576), (7, 96), (3, 32)]
    return [(32, 512), (40, 768), (7, 256)] if inputs > 32 else [(32, 512), *odd]


def test_types_of_folders_follow_those_of_ggml() -> None:
    of_folders = [is_of_folders(name) for name in BLOCK_TYPES]
    assert of_folders == sorted(of_folders) and set(of_folders) == {False, True}


def test_small_floats_are_exact_where_tiny_numbers_are_flushed() -> None:
    part = random_part("NVFP4_16", 16, 4096)
    part.raw[0].view(-1, 13)[:, 4] = torch.arange(256).clamp(max=254) - (torch.arange(256) == 127).int()
    linear, wanted = BlockLinear([part], None, 4096), values(part)
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(linear.dequantize(slice(None)), wanted)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("num_rows", [1, 3, 9])
@pytest.mark.parametrize(("name", "first", "byte"), [("Q4_1", 4, 0xFF), ("Q5_1", 4, 0xFF), ("MXFP4", 1, 0x77)])
def test_sums_of_the_largest_codes_fit(name: str, first: int, byte: int, num_rows: int) -> None:
    """AVX2 adds products in 16 bits: the lower halves of these inputs are -128, in a row 127."""
    part = random_part(name, 16, 256)
    part.raw.view(16, -1, block_sizes(name)[1])[..., first:] = byte
    x_MK = torch.full((num_rows, 256), 256.0 * -126 - 128)
    x_MK[:, ::32] = x_MK[-1] = 32639.0  # the largest input of a group has the largest code
    found, wanted = BlockLinear([part], None, 256)(x_MK), x_MK.double() @ values(part).double().T
    assert (found - wanted).abs().max() < 1e-6 * wanted.abs().max()


def rounded(x: Tensor, activations: Activations) -> Tensor:
    """Activations as integers times a scale for every 32 of them."""
    most = ROUNDING[activations][0]
    groups = nn.functional.pad(x.float(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    top = groups.abs().amax(2, keepdim=True)
    return ((groups * (most / top)).round().double() * (top / most)).flatten(1)[:, : x.shape[1]]


@EACH_KIND
@EACH_TYPE
def test_values_and_products_are_those_of_the_file(type_name: str, activations: Activations) -> None:
    """Of rows that lie apart, too, and in hardly more memory."""
    costs = ROUNDING[activations][1]
    for N, K in sizes(type_name):
        part, bias, rows = random_part(type_name, N, K), random(N), torch.tensor([N - 1, 0, N // 2])
        apart = torch.zeros(N, part.raw.shape[1] + 5, dtype=torch.uint8)
        apart[:, 3:-2] = part.raw
        for raw in (apart[:, 3:-2], part.raw):
            linear = BlockLinear([part._replace(raw=raw)], bias, K, activations=activations)
            assert torch.equal(linear.dequantize(slice(None)), values(part))
            assert torch.equal(linear.dequantize(rows), values(part)[rows])
        weight = values(part).double()
        for M in (1, 2, 3, 9):
            x = random(M, K)
            near, size = rounded(x, activations), x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
            assert ((near - x).norm(dim=1) < costs * x.norm(dim=1)).all()
            y = linear(x).double() - bias
            assert ((y - near @ weight.T).abs() < 2e-6 * size + 1e-6).all()
            assert ((y - x.double() @ weight.T).abs() < 5 * costs * size + 1e-6).all()
            linear.bias = bias.bfloat16().float()
            wanted = linear(x.bfloat16().float()).bfloat16()
            linear.bias = linear.bias.bfloat16()
            assert torch.equal(linear(x.bfloat16()), wanted)
            linear.bias = bias
    part = random_part(type_name, 32, 2048)
    assert BlockLinear([part], None, 2048).nbytes <= 1.15 * part.raw.nbytes


@EACH_KIND
@EACH_TYPE
def test_a_rows_bits_depend_on_nothing_beside_it(type_name: str, activations: Activations) -> None:
    """Nor do those of upper halves."""
    linear = BlockLinear([random_part(type_name, 88, 768)], None, 768, activations=activations)
    x = random(71, 768) * torch.logspace(-3, 3, 71)[:, None]
    assert linear.has_halves == (type_name == "Q8_0")
    for same in (linear, linear.upper_halves()) if linear.has_halves else (linear,):
        torch.set_num_threads(1)
        one_by_one = torch.cat([same(row[None]) for row in x])
        for threads, widths in ((1, (*range(1, 17), 35, 64, 71)), (2, (2, 64)), (3, (1, 5, 16, 71))):
            torch.set_num_threads(threads)
            for M in widths:
                assert torch.equal(same(x[-M:]), one_by_one[-M:])
                assert torch.equal(same(x[:M]), one_by_one[:M])


@EACH_KIND
def test_parts_of_different_types(activations: Activations) -> None:
    K = 512
    parts = [random_part(name, (48, 16, 32, 64)[seed % 4], K, seed) for seed, name in enumerate(BLOCK_TYPES)]
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
        linear, weight = BlockLinear([part], bias, K), upper_values(part)
        upper = linear.upper_halves()
        assert linear.has_halves and upper.weight.data_ptr() == linear.weight.data_ptr()
        assert torch.equal(upper.dequantize(slice(None)).double(), weight)
        for M in (1, 2, 3, 9):
            x = random(M, K)
            size = x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
            assert ((upper(x).double() - bias - rounded(x, "fast") @ weight.T).abs() < 2e-6 * size + 1e-6).all()
        assert torch.equal(linear.dequantize(slice(None)), values(part))


def test_scales_that_leave_no_bit_free_are_not_split() -> None:
    part = q8_part(32, 512)
    part.raw[5, :2] = torch.tensor([2.0], dtype=torch.float16).view(torch.uint8)
    linear = BlockLinear([part, q8_part(16, 512)], None, 512)
    assert torch.equal(linear.dequantize(slice(32)), values(part))
    upper = linear.upper_halves()
    assert torch.equal(upper.dequantize(slice(32)), values(part))
    assert not torch.equal(upper.dequantize(slice(32, 48)), linear.dequantize(slice(32, 48)))
    assert not BlockLinear([part, random_part("Q4_0", 16, 512)], None, 512).has_halves


@EACH_TYPE
def test_blocks_that_are_not_finite_are_refused(type_name: str) -> None:
    """Scales, common factors and minima of the last row."""
    dtype = {"MXFP4": torch.uint8, "NVFP4_16": torch.float32}.get(type_name, torch.float16)
    for place, wrong in product(HALVES.get(type_name) or (0,), [255] if dtype == torch.uint8 else [inf, nan]):
        part = random_part(type_name, 33, 512)
        assert is_finite(part) and BlockLinear([part], None, 512).unpacked().isfinite().all()
        blocks = part.raw[-1].view(-1, block_sizes(type_name)[1])
        blocks[:, place : place + dtype.itemsize] = torch.tensor([wrong], dtype=dtype).view(torch.uint8)
        assert not is_finite(part)
        with pytest.raises(NotFinite):
            BlockLinear([part], None, 512)


@EACH_KIND
def test_odd_rows(activations: Activations) -> None:
    """Zeros give zeros; a row that is not finite gives none that is, and leaves others alone."""
    linear, x = BlockLinear([random_part("Q8_0", 32, 512)], None, 512, activations=activations), random(4, 512)
    wanted = linear(x)
    x[1], x[2, 100], x[3, 7] = 0, float("nan"), float("inf")
    y = linear(x)
    assert torch.equal(y[0], wanted[0]) and not y[1].any() and not y[2:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embeddings(dtype: torch.dtype) -> None:
    part, ids = random_part("Q6_K", 70, 512), torch.tensor([[3, 69, 0], [64, 64, 15]])
    head = BlockLinear([part], None, 512)
    for is_head in (True, False):
        embedding = BlockEmbedding(head, dtype, is_head=is_head)
        assert torch.equal(embedding(ids), values(part).to(dtype)[ids])
        with pytest.raises(IndexError, match="rows 3 to 70 of 70"):
            embedding(torch.tensor([3, 70]))
        assert embedding.linear is head and len(list(embedding.buffers())) == (0 if is_head else 2)


def test_operators_of_compiled_code() -> None:
    """Inductor calls them, and takes shapes from those without numbers."""
    linear = BlockLinear([random_part("Q4_K", 40, 256)], random(40), 256)
    x, rows = random(2, 3, 256), torch.tensor([[7]])
    for where in ("cpu", "meta"):
        x, rows, *tensors = (each.to(where) for each in (x, rows, linear.weight, linear.table, linear.bias))
        product = torch.ops.sharesd.block_linear(x, *tensors, 40)
        decoded = torch.ops.sharesd.decode_rows(rows, *tensors[:2], 40, 256, torch.bfloat16)
        if where == "cpu":
            assert torch.equal(product, linear(x)) and torch.equal(decoded, linear.dequantize(rows).bfloat16())
        assert (product.shape, product.dtype) == ((2, 3, 40), torch.float32)
        assert (decoded.shape, decoded.dtype) == ((1, 1, 256), torch.bfloat16)


@EACH_KIND
@pytest.mark.parametrize("is_reordered", [False, True])
def test_numbers_next_to_blocks_keep_their_values(is_reordered: bool, activations: Activations) -> None:
    """Parts of one type that end within a record become one; numbers are put into the order of the blocks."""
    for K in (96, 512):
        blocks = [random_part("Q8_0", N, K, N) for N in (24, 24)]
        blocks = [part._replace(order=reordered(blocks[0]).order) for part in blocks] if is_reordered else blocks
        kinds = zip(NUMBERS.items(), (16, 32, 41), strict=True)
        numbers = [BlockPart(kind, random(N, K).to(dtype)) for (kind, dtype), N in kinds]
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
        pieces = linear.weight.float().split(linear.out_features // 2 // 16 * 16)
        types = (["Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1"] * 2)[first:]
        raws = [gguf.quantize(piece.numpy(), ggml_type(name)) for piece, name in zip(pieces, types, strict=False)]
        parts = [BlockPart(name, torch.from_numpy(raw)) for raw, name in zip(raws, types, strict=False)]
        parts = [reordered(part) for part in parts] if first else parts
        return BlockLinear(parts, linear.bias, linear.in_features, activations=activations)

    for number, block in enumerate(model.blocks):
        for module, names in ((block.attn, ("qkv", "o")), (block.mlp, ("gate_up", "down"))):
            for i, name in enumerate(names):
                setattr(module, name, with_blocks(getattr(module, name), number + i))
    return model


@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stack_step_equals_the_composed_one(dtype: torch.dtype, activations: Activations) -> None:
    """Close to it; its rows have the same bits whatever is computed with them."""
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


def widened(weight_NK: Tensor) -> WidenedLinear:
    """Weights of bfloat16 that have the bits of float32 ones with the same values."""
    return WidenedLinear(weight_NK, HugePageArena().zeros)


@pytest.mark.parametrize("size", [(16, 32), (70, 96), (48, 33), (1, 5)])
def test_bits_are_those_of_float32_weights(size: tuple[int, int]) -> None:
    plain, x = random(*size).bfloat16(), random(20, size[1])
    linear, wide = widened(plain), PackedLinear(plain.float(), None)
    assert linear.weight.nbytes * 2 == wide.weight.nbytes
    assert torch.equal(linear.unpacked(), plain.float()) and linear.dtype == torch.float32
    for rows in (1, 2, 3, 9, 17, 20):
        assert torch.equal(linear(x[:rows]), wide(x[:rows]))
        assert torch.equal(linear(x[:rows])[-1], wide(x[rows - 1 : rows])[0])
    of_stack, part = LinearStruct.of(linear), BlockPart("BF16", plain)
    assert (of_stack.bits, of_stack.weight, of_stack.bias) == (16, linear.weight.data_ptr(), None)
    assert size == (of_stack.N, of_stack.K) and of_stack.G == 0
    assert part.shape == size and torch.equal(part.numbers(), plain.float())


def test_rows_of_bfloat16_may_lie_apart_and_embeddings_read_them() -> None:
    for apart in (random(70, 100).bfloat16()[:, 3:67], random(64, 70).bfloat16().t()):
        linear, wanted = widened(apart), apart.float()
        assert torch.equal(linear.unpacked(), wanted)
        embedding, ids = BlockEmbedding(linear, torch.float32, is_head=True), torch.tensor([[3, 69], [0, 17]])
        assert torch.equal(embedding(ids), wanted[ids]) and torch.equal(embedding.weight, wanted)
        assert torch.equal(linear.dequantize(ids), wanted[ids])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bfloat16_that_is_not_finite_is_refused(value: float) -> None:
    large = torch.full((16, 32), 2.0**125).bfloat16()
    assert torch.equal(widened(large).unpacked(), large.float())
    large[3, 4] = value
    with pytest.raises(NotFinite):
        widened(large)


def sources(folder: Path, row: str) -> Path:
    """A copy of the kernels with one type of the project, which compile sooner than all, and a made-up one."""
    copied = Path(shutil.copytree(cpp_extension.SOURCE_FOLDER, folder / "cpu"))
    first = next(line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("BLOCK_TYPE(Q8_0"))
    (copied / TABLE.name).write_text("\n".join([first, row, "#undef BLOCK_TYPE", ""]))
    codecs = copied / "block_codecs.h"
    before, end, after = codecs.read_text().rpartition("}  // namespace sharesd")
    codecs.write_text(before + CODEC + end + after)
    return copied


@pytest.mark.slow
def test_a_row_and_its_codec_make_a_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sources(tmp_path, ROW)
    with monkeypatch.context() as patch:
        patch.setattr(cpp_extension, "SOURCE_FOLDER", folder)
        built = cpp_extension.library.__wrapped__("block_ops")
    types = read_table((folder / TABLE.name).read_text())
    changes = {"TYPES": types, "BLOCK_TYPES": tuple(types), "library": lambda part: built}
    for name, value in {**changes, "_block_kernel": block_linear._block_kernel.__wrapped__}.items():
        monkeypatch.setattr(block_linear, name, value)

    of_models = cpp_extension.kernel

    def kernel(name: str, dtype: torch.dtype, *argtypes: type) -> object:
        if name == "block_linear":  # a kernel of the model's dtype, which does not depend on types
            return of_models(name, dtype, *argtypes)
        function = getattr(built, f"{name}_{str(dtype).removeprefix('torch.')}")
        function.argtypes, function.restype = argtypes, None
        return function

    monkeypatch.setattr(cpp_extension, "kernel", kernel)
    monkeypatch.setattr(cpp_extension, "_called", {})
    N, K, dice = 40, 96, np.random.default_rng(1)
    codes = dice.integers(0, 16, (N, K // 32, 32), dtype=np.uint8)
    scales = dice.normal(0, 0.01, (N, K // 32, 1)).astype(np.float16)
    blocks = np.concatenate([codes[..., ::2] | codes[..., 1::2] << 4, scales.view(np.uint8)], -1)
    weights = torch.from_numpy(((codes.astype(np.float64) - 4) * scales.astype(np.float64)).reshape(N, K))
    linear = BlockLinear([BlockPart("MADE_UP", torch.from_numpy(blocks.reshape(N, -1)))], None, K)
    assert torch.equal(linear.unpacked().double(), weights)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    y, exact = linear(x), x.double() @ weights.T
    assert ((y - exact).norm() / exact.norm()).item() < 3e-5
    assert torch.equal(linear(x[2:3])[0], y[2])


@pytest.mark.slow
def test_sizes_that_are_not_the_codecs_do_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sources(tmp_path, ROW.replace("18", "19"))
    monkeypatch.setattr(cpp_extension, "SOURCE_FOLDER", folder)
    monkeypatch.setenv("SHARESD_CXXFLAGS", "-fsyntax-only")
    with pytest.raises(RuntimeError, match="the sizes of MADE_UP are not those of its codec"):
        cpp_extension.library.__wrapped__("block_ops")


def test_rows_are_read() -> None:
    assert read_table(ROW) == {"MADE_UP": BlockType(32, 18, 64, 576, {"low": 4, "zero": 4}, quantizes=False)}
    with pytest.raises(ValueError, match="block_types.def: cannot read the row 'BLOCK_TYPE"):
        read_table(ROW.replace("GPU", "CUDA"))


def test_all_types_have_a_form_for_gpus() -> None:
    assert list(FORMS) == list(TYPES)
    assert {form.codec for form in FORMS.values()} == {*CODECS}
    assert FORMS["Q6_K"] == BlockForm(4, 2, 32, group=16, scales="bytes", bias=128, codec="q6_k")
