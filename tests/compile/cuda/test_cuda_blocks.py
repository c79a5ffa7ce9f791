"""Products of GGUF blocks compiled for GPUs that are not there: enough in flight, and codes that are exact."""

from __future__ import annotations

import re
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.block_linear import BLOCK_TYPES
from compile.cuda.block_codes import TABLES, _instructions
from compile.cuda.block_form import FORMS
from compile.cuda.block_gemm import decode_rows, multiply_blocks
from compile.cuda.gemm_config import ROWS, Tile, block_tile
from tests.compile.cuda.test_cuda_tiles import check
from tests.helpers.absent_gpu import SHARED, Binary, count, gpu

ARCHS = 80, 86, 89, 90, 120
PLACES = [(arch, name, ("", "silu")[(at + arch) % 2]) for at, name in enumerate(BLOCK_TYPES) for arch in ARCHS]
FAST = [(90, "Q8_0"), (80, "Q4_0")]


def compiled(name: str, N: int, K: int, tile: Tile, arch: int, *, gated: str = "") -> Binary:
    """The product of one row as that GPU would run it."""
    form, num = FORMS[name], N // 2 if gated else N
    with gpu(arch) as made:
        half, word = (partial(torch.empty, device="cuda", dtype=dtype) for dtype in (torch.bfloat16, torch.int32))
        around = {"residual": half(1, num), "gated": gated}
        product = partial(multiply_blocks, half(1, K), word(form.records(N, K)), form, half(1, num), 0, num, tile)
        product(counters=word(-(-N // ROWS)), **around)
    return made[0]


def tile_of(name: str, N: int, K: int) -> Tile:
    form = FORMS[name]
    _, units, words = form.records(N, K)
    return block_tile(None, N, units, form.unit, 4 * words)


def mark_of(at: int) -> pytest.MarkDecorator | tuple[()]:
    """Each type is compiled for one of the GPUs in the slow tier, and for all of them in the long one."""
    arch, name, _ = PLACES[at]
    if (arch, name) in FAST:
        return ()
    type_number, arch_number = divmod(at, len(ARCHS))
    return pytest.mark.slow if arch_number == type_number % len(ARCHS) else pytest.mark.long


@pytest.mark.parametrize(
    "arch, name, gated",
    [pytest.param(*place, marks=mark_of(at)) for at, place in enumerate(PLACES)],
)
def test_products_do_nothing_twice(arch: int, name: str, gated: str) -> None:
    """In the loop hardly a spill, no plain loads, and each product once."""
    N, K, form = 8192, 65536, FORMS[name]
    tile = Tile(64, form.unit, 1, 4 if SHARED[arch] > 100 else 3, 2)
    made = compiled(name, N, K, tile, arch, gated=gated)
    assert made.shared <= SHARED[arch] * 1024, made.shared
    assert made.loop and count(made.loop, "LDG") == 0, "something in the loop is not fetched ahead of its use"
    assert count(made.loop, "LDL") <= 4 and count(made.loop, "STL") == 0, "registers are spilled in the loop"
    products = tile.outputs // 16 * 128 // 16 * ROWS // 8
    most = 2 * products if form.minimum else products  # sums of inputs may be made for each 16 outputs
    assert products <= count(made.loop, "HMMA") * tile.warps <= most, "warps multiply the same"
    assert made.resident() * tile.warps >= 8 or SHARED[arch] < 100, "each scheduler has two warps to choose from"


@pytest.mark.parametrize("name", ["Q8_0", pytest.param("Q4_K", marks=pytest.mark.slow)])
def test_split_products_wait_before_they_touch_memory(name: str) -> None:
    made = compiled(name, 4096, 4096, tile_of(name, 4096, 4096), 90)
    check(made.ptx)
    assert "atom.global.gpu.acq_rel.add" in made.ptx and "prefetch.global.L2" in made.ptx


def test_decoding_compiles() -> None:
    for name in BLOCK_TYPES:
        with gpu(90) as made:
            words = torch.empty(FORMS[name].records(4096, 4096), dtype=torch.int32, device="cuda")
            decode_rows(None, words, FORMS[name], torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda"))
        assert made[0].spilled == 0, name


def halves(words: np.ndarray, is_bfloat16: bool) -> np.ndarray:
    """The two numbers of each word, in float64."""
    pairs = np.atleast_1d(words).astype(np.uint32).view(np.uint16).reshape(-1, 2)
    return ((pairs.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else pairs.view(np.float16)).astype(float)


def run(ptx: str, words: dict[str, Any], is_bfloat16: bool) -> np.ndarray:
    """Result in $0 of a few instructions of PTX, one after the other, for many words at once."""
    names = dict(words)
    for line in ptx.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *given = (part.strip() for part in rest.split(","))
        values = [names[text] if text in names else np.int64(int(text, 0)) for text in given]
        if name.startswith("fma"):
            a, b, c = (halves(value, is_bfloat16) for value in values)
            return a * b + c
        if name.startswith("prmt"):
            picked = [values[2] >> 4 * i & 15 for i in range(4)]
            assert np.max(picked) < 8
            eight = values[0] | values[1] << 32
            names[to] = sum((eight >> 8 * pick & 255) << 8 * i for i, pick in enumerate(picked))
            continue
        names[to] = {
            "mov": lambda a: a,
            "shr": lambda a, b: a >> b,
            "shl": lambda a, b: a << b & 0xFFFFFFFF,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "lop3": lambda a, b, c, table: (a & b) | c,
        }[name.split(".")[0]](*values)
        assert not name.startswith("lop3") or given[3] == "0xea"
    raise AssertionError(ptx)


@pytest.mark.parametrize("is_bfloat16", [True, False], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_codes_are_exact_operands(name: str, is_bfloat16: bool) -> None:
    """The instructions that make pairs of numbers of words, by an interpreter of them."""
    form, seen = FORMS[name], set()
    low, high = np.random.default_rng(0).integers(0, 2**32, (2, 600))
    for t, half in product(range(128 // form.columns), range(form.unit // 128)):
        ptx = _instructions.fn(t, is_bfloat16, form.low, form.high, form.zero, form.table)
        got = run(ptx, {"$1": low, "$2": high, "$3": np.int64(8 * half)}, is_bfloat16)
        for place in (0, 1):
            code = low >> 16 * place + t * form.low % 16 & 2**form.low - 1
            if form.high:
                shift = t * form.high % 16 + (8 * half if form.high == 1 else 0)
                code |= (high >> 16 * place + shift & 2**form.high - 1) << form.low
            if form.low == 8:
                code -= 256 * (code > 127)
            want = np.array(TABLES[form.table])[code] if form.table else code - form.zero
            assert np.array_equal(got[:, place], want), (t, half, place)
            seen.update(code.tolist())
    assert len(seen) == 2 ** (form.low + form.high)
    assert re.search("fma.rn.bf16x2" if is_bfloat16 else "fma.rn.f16x2", ptx)
