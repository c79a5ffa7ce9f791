"""The CPU kernels: the right values, and for every row the same bits whatever is computed beside it.

Legend: B rows of the batch, T new tokens, H query heads, K key/value heads, S slots, d head size; of linears M rows,
N outputs, K inputs.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile import cpp_extension
from compile.attention import attend, attend_reference
from compile.kv_layout import CHUNK, SLOT_MULTIPLE, new_kv, pack_kv, unpack_kv
from compile.linear import (
    QUANTIZED_INPUT_MULTIPLE,
    PackedLinear,
    QuantizedPackedLinear,
    pack_linears,
)
from compile.topk import top_k, top_logp, top_logp_reference

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- attention


class Case(NamedTuple):
    """Random inputs of one call; the caches are full of old values, live or not."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor

    def fresh(self) -> Case:
        return self._replace(k_cache=self.k_cache.clone(), v_cache=self.v_cache.clone())

    def row(self, b: int) -> Case:
        one = Case(*(t[b : b + 1] for t in self))
        return one.fresh()

    def plain(self) -> Case:
        """With caches [B, K, S, d]."""
        k_cache, v_cache = unpack_kv(self.k_cache, self.v_cache, self.q.shape[3])
        return self._replace(k_cache=k_cache, v_cache=v_cache)

    def packed(self) -> Case:
        """With caches in the layout of the kernel, from such."""
        k_cache, v_cache = pack_kv(self.k_cache, self.v_cache)
        return self._replace(k_cache=k_cache, v_cache=v_cache)

    def tokens(self, start: int, end: int) -> Case:
        q, k, v = (t[:, start:end] for t in (self.q, self.k, self.v))
        return self._replace(q=q, k=k, v=v, lengths=self.lengths + start)


def make_case(
    dtype: torch.dtype,
    *,
    T: int = 5,
    heads: tuple[int, int] = (4, 2),
    d: int = 16,
    lengths: tuple[int, ...] = (7,),
    slots: int = 96,
    seed: int = 0,
) -> Case:
    dice = torch.Generator().manual_seed(seed)
    B, (H, K) = len(lengths), heads

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice, dtype=torch.float64).to(dtype)

    k_cache, v_cache = pack_kv(random(B, K, slots, d), random(B, K, slots, d))
    return Case(random(B, T, H, d), random(B, T, K, d), random(B, T, K, d), k_cache, v_cache, torch.tensor(lengths))


def check_attention(case: Case, **options: Any) -> None:
    """Against the reference in float64 on the same numbers."""
    settings = {"scale": case.q.shape[-1] ** -0.5, **options}
    ours = case.fresh()
    out = attend(*ours, **settings)
    wide = Case(*(t.double() if t.is_floating_point() else t for t in case.plain()))
    wanted = attend_reference(*wide, **settings)
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
    written = ours.plain()
    assert torch.equal(written.k_cache.double(), wide.k_cache) and torch.equal(written.v_cache.double(), wide.v_cache)


@EACH_DTYPE
@pytest.mark.parametrize("d", [7, 16, 33, 56, 64, 80, 96, 120, 128, 256, 512])
def test_attention_of_every_head_size(d: int, dtype: torch.dtype) -> None:
    check_attention(make_case(dtype, d=d, lengths=(0, 13, 40)))


@EACH_DTYPE
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 2), (14, 2), (9, 3)])
def test_attention_of_grouped_heads(heads: tuple[int, int], dtype: torch.dtype) -> None:
    for T in (1, 2, 5, 17):
        check_attention(make_case(dtype, heads=heads, T=T, lengths=(3, 29)))


@EACH_DTYPE
@pytest.mark.parametrize(
    "options", [{"window": 1}, {"window": 5}, {"window": 33}, {"softcap": 2.0}, {"softcap": 1.5, "window": 20}], ids=str
)
def test_attention_with_windows_and_soft_caps(options: dict[str, Any], dtype: torch.dtype) -> None:
    for T in (1, 4, 9):
        check_attention(make_case(dtype, T=T, lengths=(0, 31, 64)), **options)


@EACH_DTYPE
def test_attention_at_the_borders_of_blocks(dtype: torch.dtype) -> None:
    for length in (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65):
        for T in (1, 2, 16, 17, 31):
            check_attention(make_case(dtype, T=T, lengths=(length,)))
    check_attention(make_case(dtype, T=32, lengths=(64,)))  # up to the last slot
    check_attention(make_case(dtype, T=7, d=120, lengths=(89,)))


def test_attention_of_scores_far_apart_and_far_from_zero() -> None:
    """Softmax is taken relative to the largest score; weights that underflow are no NaN."""
    for factor in (1e-3, 30.0, 300.0):
        for dtype in (torch.float32, torch.float64):
            case = make_case(dtype, T=3, lengths=(40,))
            check_attention(case._replace(q=case.q * factor))


@EACH_DTYPE
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize(("heads", "d"), [((4, 2), 16), ((3, 1), 80), ((7, 1), 64), ((2, 2), 120)])
def test_a_querys_bits_depend_on_nothing_beside_it(
    heads: tuple[int, int], d: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """The width of the step, the batch, the number of slots and of threads, and what lies in dead slots."""
    settings = {"scale": d**-0.5, **options}
    case = make_case(dtype, T=17, heads=heads, d=d, lengths=(0, 30, 45))
    out = attend(*case.fresh(), **settings)
    for b in range(3):
        for width in (1, 2, 5, 16):
            steps = case.row(b)
            parts = [attend(*steps.tokens(i, i + width), **settings) for i in range(0, 17, width)]
            assert torch.equal(torch.cat(parts, 1), out[b : b + 1])
    other = case.plain()
    dead = torch.arange(96) >= (case.lengths + 17)[:, None]
    for cache in (other.k_cache, other.v_cache):
        cache.masked_fill_(dead[:, None, :, None], math.nan)
    assert torch.equal(attend(*other.packed(), **settings), out)
    large = make_case(dtype, T=17, heads=heads, d=d, lengths=(0, 30, 45), slots=224).plain()
    for ours, theirs in zip(large[3:5], case.plain()[3:5], strict=True):
        ours[:, :, :96].copy_(theirs)
    assert torch.equal(attend(*case[:3], *large.packed()[3:], **settings), out)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(attend(*case.fresh(), **settings), out)


@EACH_DTYPE
@pytest.mark.parametrize("options", [{}, {"window": 170}, {"recent": 1}, {"recent": 150}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize(("heads", "d"), [((6, 2), 16), ((2, 2), 40), ((14, 1), 24)])
def test_a_querys_bits_in_long_contexts_depend_on_nothing_beside_it(
    heads: tuple[int, int], d: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Of several chunks, which threads share: steps that begin before, at and behind their borders."""
    settings = {"scale": d**-0.5, **options}
    lengths = (3 * CHUNK - 9, 2 * CHUNK, CHUNK - 1)
    case = make_case(dtype, T=16, heads=heads, d=d, lengths=lengths, slots=4 * CHUNK)
    check_attention(case, **options)
    out = attend(*case.fresh(), **settings)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(attend(*case.fresh(), **settings), out)
        for b in range(3):
            for width in (1, 2, 5, 11) if threads == 2 else (9,):
                steps = case.row(b)
                parts = [attend(*steps.tokens(i, i + width), **settings) for i in range(0, 16, width)]
                assert torch.equal(torch.cat(parts, 1), out[b : b + 1])


def test_rounding_weights_costs_no_more_than_it_does_elsewhere() -> None:
    """bfloat16 against float64: the error is that of torch's own attention at most."""
    case = make_case(torch.bfloat16, T=8, heads=(9, 3), d=64, lengths=(2000,), slots=2048)
    wide = Case(*(t.double() if t.is_floating_point() else t for t in case.plain()))
    wanted = attend_reference(*wide, scale=0.125)
    theirs = attend_reference(*case.plain(), scale=0.125).double()
    ours = attend(*case.fresh(), scale=0.125).double()
    assert (ours - wanted).norm() < 1.1 * (theirs - wanted).norm()


@EACH_DTYPE
def test_attention_takes_slices_of_a_projection(dtype: torch.dtype) -> None:
    """Queries, keys and values as views of one tensor, and with heads that lie apart."""
    case = make_case(dtype, T=3, lengths=(5, 9))
    wanted = attend(*case.fresh(), scale=0.25)
    merged = torch.cat((case.q, case.k, case.v), 2)
    views = merged.split((4, 2, 2), dim=2)
    assert not views[0].is_contiguous()
    apart = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (case.q, case.k, case.v)]
    for q, k, v in (views, apart):
        assert torch.equal(attend(*case.fresh()._replace(q=q, k=k, v=v), scale=0.25), wanted)


@EACH_DTYPE
@pytest.mark.smoke
def test_slots_beyond_the_cache_are_not_written(dtype: torch.dtype) -> None:
    """Padding rows of a row that is full: they vanish, and the rows before them are right."""
    for length in (90, 95, 96, 200):
        case = make_case(dtype, T=9, lengths=(length, 3))
        ours = case.fresh()
        out = attend(*ours, scale=0.25)
        num = max(0, min(9, 96 - length))
        alone = case.fresh()
        assert torch.equal(attend(*alone.row(1), scale=0.25), out[1:])
        if num:
            kept = case.row(0)
            assert torch.equal(attend(*kept.tokens(0, num), scale=0.25), out[:1, :num])
            assert torch.equal(kept.k_cache, ours.k_cache[:1]) and torch.equal(kept.v_cache, ours.v_cache[:1])
        else:
            assert torch.equal(ours.k_cache[0], case.k_cache[0]) and torch.equal(ours.v_cache[0], case.v_cache[0])
        assert torch.equal(ours.plain().v_cache[1, :, 12:], case.plain().v_cache[1, :, 12:])


def test_new_kv_rounds_slots_up() -> None:
    for dtype in DTYPES:
        k, v = new_kv(2, 3, SLOT_MULTIPLE + 1, 7, dtype, torch.device("cpu"))
        for cache in unpack_kv(k, v, 7):
            assert cache.shape == (2, 3, 2 * SLOT_MULTIPLE, 7) and not cache.any()


@EACH_DTYPE
@pytest.mark.parametrize("d", [1, 7, 16, 40, 80])
def test_packing_keys_and_values_loses_nothing(d: int, dtype: torch.dtype) -> None:
    plain = [torch.randn(2, 3, 64, d).to(dtype) for _ in range(2)]
    for ours, wanted in zip(unpack_kv(*pack_kv(plain[0], plain[1]), d), plain, strict=True):
        assert torch.equal(ours, wanted)


# ---- linears

SHAPES = [(16, 16), (40, 32), (1, 7), (17, 33), (100, 95), (64, 1), (200, 48), (24, 2048)]


def make_linear(dtype: torch.dtype, N: int, K: int, bias: bool = True) -> nn.Linear:
    dice = torch.Generator().manual_seed(N * 1000 + K)
    linear = nn.Linear(K, N, bias=bias, dtype=torch.float64).requires_grad_(False)
    for tensor in linear.parameters():
        tensor.copy_(torch.randn(tensor.shape, generator=dice, dtype=torch.float64) * K**-0.5)
    return linear.to(dtype)


def inputs(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


@EACH_DTYPE
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_packed_linear_equals_linear(N: int, K: int, bias: bool, dtype: torch.dtype) -> None:
    linear = make_linear(dtype, N, K, bias)
    packed = PackedLinear(linear.weight, linear.bias)
    assert (packed.in_features, packed.out_features) == (K, N)
    for shape in ((1,), (7,), (2, 3)):
        x = inputs(dtype, *shape, K)
        wanted = F.linear(x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double())
        tolerance = TOLERANCE[dtype]
        y = packed(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance)


@EACH_DTYPE
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_a_rows_bits_depend_on_nothing_beside_it(N: int, K: int, dtype: torch.dtype) -> None:
    linear = make_linear(dtype, N, K)
    packed = PackedLinear(linear.weight, linear.bias)
    x = inputs(dtype, 33, K)
    alone = torch.cat([packed(x[m : m + 1]) for m in range(33)])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for M in (*range(1, 20), 33):
            assert torch.equal(packed(x[:M]), alone[:M])
            assert torch.equal(packed(x[-M:]), alone[-M:])
    assert torch.equal(packed(x[:, None].transpose(0, 1)), alone[None])


@EACH_DTYPE
@pytest.mark.parametrize("K", [32, 96, 100])
@pytest.mark.smoke
def test_a_rows_bits_where_numbers_are_of_all_sizes(K: int, dtype: torch.dtype) -> None:
    """Tiles of bfloat16 sum in an order of their own and take subnormal numbers for 0; few rows go without tiles."""
    dice = torch.Generator().manual_seed(K)
    lowest = math.log2(torch.finfo(dtype).tiny)
    sizes = torch.randint(round(lowest / 2) - 8, 5, (2, 70, K), generator=dice).double().exp2()
    x, weight = (torch.randn(2, 70, K, generator=dice, dtype=torch.float64) * sizes).to(dtype)
    packed = PackedLinear(weight, None)
    assert not len(packed(x[:0]))
    for size in (1.0, 2 ** (lowest / 2)):  # the sums, too, become as small as there are
        alone = torch.cat([packed(row[None] * size) for row in x])
        for M in (2, 3, 15, 16, 17, 32, 33, 48, 70):
            assert torch.equal(packed(x[:M] * size), alone[:M])
            assert torch.equal(packed(x[-M:] * size), alone[-M:])
    assert (alone != 0).any()


def test_packed_linear_takes_any_stride() -> None:
    linear = make_linear(torch.float32, 24, 10)
    packed = PackedLinear(linear.weight, linear.bias)
    wide = inputs(torch.float32, 6, 20)
    for x in (wide[:, ::2], wide[::2, :10], inputs(torch.float32, 10, 4).t()):
        assert torch.equal(packed(x), packed(x.clone(memory_format=torch.contiguous_format)))


def test_packed_linear_refuses_another_dtype() -> None:
    """The kernel would read the weights as numbers of another size."""
    linear = make_linear(torch.bfloat16, 16, 16)
    with pytest.raises(AssertionError, match="packed for torch.bfloat16, called with torch.float32"):
        PackedLinear(linear.weight, None)(inputs(torch.float32, 1, 16))


def test_pack_linears_replaces_all_but_the_kept() -> None:
    class Special(nn.Linear):
        pass

    inner = nn.Sequential(nn.Linear(8, 8, bias=False))
    model = nn.Sequential(nn.Linear(4, 8), inner, Special(8, 8), nn.Linear(8, 4))
    model.requires_grad_(False)
    x = inputs(torch.float32, 3, 4)
    wanted = model(x)
    kept = model[3]
    assert pack_linears(model, keep=(kept,)) == 2
    assert [type(m).__name__ for m in (model[0], inner[0], model[2], model[3])] == [
        "PackedLinear",
        "PackedLinear",
        "Special",
        "Linear",
    ]
    torch.testing.assert_close(model(x), wanted)


# ---- linears of 4 and 8 bits


@EACH_DTYPE
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("N", "K", "group_size"), [(16, 32, 32), (40, 128, 64), (17, 96, 96), (100, 256, 128), (1, 64, 32)]
)
def test_low_linear_multiplies_rounded_activations(
    N: int, K: int, group_size: int, bits: int, dtype: torch.dtype
) -> None:
    dice = torch.Generator().manual_seed(N)
    codes = torch.randint(0, 2**bits, (N, K), generator=dice, dtype=torch.uint8)
    scale, offset = (torch.randn(N, K // group_size, generator=dice).bfloat16() for _ in range(2))
    bias = inputs(dtype, N)
    low = QuantizedPackedLinear(codes, scale, offset, bias, bits)
    x = inputs(dtype, 9, K)
    x[4] = 0  # a group without any activation
    groups = x.double().view(9, -1, QUANTIZED_INPUT_MULTIPLE)
    step = groups.abs().amax(-1, keepdim=True) / {4: 127, 8: 2**15 - 1}[bits]
    rounded = ((groups / step).nan_to_num().round() * step).view(9, K)
    wide = [t.double().repeat_interleave(group_size, 1) for t in (scale, offset)]
    weight = (codes.double() - 2 ** (bits - 1)) * wide[0] + wide[1]
    wanted = F.linear(rounded, weight, bias.double())
    y = low(x)
    assert y.dtype == dtype
    tolerance = {torch.float64: 1e-4, torch.float32: 1e-4}.get(dtype, 1e-2)  # sums are float32 at most
    assert (y.double() - wanted).norm() < tolerance * wanted.norm()
    exact = F.linear(x.double(), weight, bias.double())
    assert (y.double() - exact).norm() < {4: 2e-2, 8: max(2e-4, tolerance)}[bits] * wanted.norm()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(torch.cat([low(x[m : m + 1]) for m in range(9)]), y) and torch.equal(low(x[2:7]), y[2:7])
    assert low.nbytes == sum(buffer.nbytes for name, buffer in low.named_buffers() if name != "bias")


# ---- building


@pytest.fixture
def own_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of its own, and no library loaded yet."""
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "library", functools.cache(cpp_extension.library.__wrapped__))
    yield tmp_path


def test_no_compiler_is_explained(own_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(cpp_extension.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler found.*install one.*or set CXX"):
        cpp_extension.library("float32")


@pytest.mark.parametrize(
    ("compiler", "message"), [("no-such-compiler", "no-such-compiler does not run"), ("false", "could not build")]
)
def test_a_compiler_that_fails_is_named(
    compiler: str, message: str, own_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(RuntimeError, match=message):
        cpp_extension.library("float32")
    assert not [path for path in own_build.rglob("*") if path.is_file()], "nothing half-built is left"


def fake_compiler(folder: Path) -> Path:
    """A compiler that hands out the library built before, and notes that it was asked."""
    real = Path(cpp_extension.library("float32")._name)
    script = folder / "c++"
    script.write_text(
        f'#!/bin/sh\necho asked >> "{folder}/log"\nwhile [ "$1" != "-o" ]; do shift; done\ncp "{real}" "$2"\n'
    )
    script.chmod(0o755)
    return script


def test_kernels_are_built_once_and_a_damaged_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path)))
    monkeypatch.setattr(cpp_extension, "library", functools.cache(cpp_extension.library.__wrapped__))
    log = tmp_path / "log"

    def load(folder: str) -> Path:
        monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / folder))
        cpp_extension.library.cache_clear()
        assert cpp_extension.library("float32").attend_float32
        return Path(cpp_extension.library("float32")._name)

    try:
        first = load("one")
        assert load("one") == first and log.read_text().count("asked") == 1
        assert [path for path in (tmp_path / "one").rglob("*") if path.is_file()] == [first]
        damaged = tmp_path / "two" / first.relative_to(tmp_path / "one")
        damaged.parent.mkdir(parents=True)
        damaged.write_bytes(os.urandom(1000))
        with caplog.at_level(logging.WARNING):
            assert load("two") == damaged
        assert f"rebuilding {damaged}" in caplog.text and log.read_text().count("asked") == 2
        assert damaged.read_bytes() == first.read_bytes()
    finally:
        cpp_extension.library.cache_clear()


def test_the_largest_where_few_are_above_minus_infinity() -> None:
    """As after top-k: whole blocks of nothing must not be passed over before there are k."""
    x = torch.full((2, 2000), -torch.inf)
    x[0, 1999], x[1, 300] = 1.0, 2.0
    assert top_k(x, 3).tolist() == [[1999, 0, 1], [300, 0, 1]]


@EACH_DTYPE
@pytest.mark.parametrize("V", [5, 16, 1003])
def test_log_probabilities_of_the_largest(V: int, dtype: torch.dtype) -> None:
    x = (8 * torch.randn(7, V, generator=torch.Generator().manual_seed(V), dtype=torch.float64)).to(dtype)
    x[1, : V - 5] = -torch.inf
    best, logp = top_logp(x, 5)
    want, want_logp = top_logp_reference(x, 5)
    assert torch.equal(x.gather(1, best), x.gather(1, want)) and logp.dtype == want_logp.dtype
    torch.testing.assert_close(logp, want_logp, atol=1e-5, rtol=1e-5)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for rows in (slice(0, 7), slice(2, 3)):
            again = top_logp(x[rows], 5)
            assert torch.equal(again[0], best[rows]) and torch.equal(again[1], logp[rows])


def test_only_libraries_that_exist_are_built_ahead() -> None:
    """An unknown name was compiled, without success, at each start."""
    with pytest.raises(ValueError, match="there is no library 'choice'"):
        cpp_extension.prepare("bfloat16", "choice")
    cpp_extension.prepare("sampling_ops")
