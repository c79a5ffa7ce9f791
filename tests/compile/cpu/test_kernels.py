"""The CPU kernels: the right values, and for every row the same bits whatever is computed with it.

Legend: B rows of the batch, T new tokens, H query heads, K key/value heads, S slots, d head size; of linears M rows,
N outputs, K inputs.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile import cpp_extension
from compile.attention import attend, attend_reference
from compile.huge_pages import HugePageArena
from compile.kv_compact import compact_slots, compact_slots_reference
from compile.kv_layout import CHUNK, SLOT_MULTIPLE, new_kv, pack_kv, unpack_kv
from compile.linear import NotFinite, PackedLinear, QuantizedPackedLinear, pack_linears, pack_rows, packed_size
from compile.topk import top_k, top_logp, top_logp_reference

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
COMPILERS = {"": "no C\\+\\+ compiler found.*install one.*or set CXX", "false": "could not build"}
COMPILERS |= {"no-such-compiler": "no-such-compiler does not run"}
"""Messages about compilers that are missing or fail."""
Heads = tuple[int, int]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
WINDOWS = ({"window": 1}, {"window": 5}, {"window": 33}, {"softcap": 2.0}, {"softcap": 1.5, "window": 20})
WINDOWS += ({"sinks": True}, {"sinks": True, "window": 5})
LINEARS = [(16, 16), (40, 32), (1, 7), (17, 33), (100, 95), (64, 1), (200, 48), (24, 2048)]


class Case(NamedTuple):
    """Random inputs of one call; the caches are full of old values, live or not."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor

    def fresh(self) -> Self:
        return self._replace(k_cache=self.k_cache.clone(), v_cache=self.v_cache.clone())

    def double(self) -> Self:
        return self._make(t.double() if t.is_floating_point() else t for t in self)

    def row(self, b: int) -> Self:
        return self._make(t[b : b + 1] for t in self).fresh()

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
    heads: Heads = (4, 2),
    d: int = 16,
    lengths: Sequence[int] = (7,),
    slots: int = 96,
) -> Case:
    dice = torch.Generator().manual_seed(0)
    B, (H, K) = len(lengths), heads

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice, dtype=torch.float64).to(dtype)

    k_cache, v_cache = pack_kv(random(B, K, slots, d), random(B, K, slots, d))
    return Case(random(B, T, H, d), random(B, T, K, d), random(B, T, K, d), k_cache, v_cache, torch.tensor(lengths))


def check_attention(case: Case, **options: Any) -> None:
    """Against the reference in float64 on the same numbers."""
    settings = settings_of(case, options)
    ours, wide, tolerance = case.fresh(), case.plain().double(), TOLERANCE[case.q.dtype]
    out, wanted = attend(*ours, **settings), attend_reference(*wide, **settings)
    where = f"queries {tuple(case.q.shape)} behind {case.lengths.tolist()}: "
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance, msg=lambda text: where + text)
    assert all(map(torch.equal, ours.plain().double()[3:5], wide[3:5])), "keys and values as the reference writes them"


def settings_of(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """Options of attention; sinks far below and above the scores for those of a model."""
    settings = {"scale": case.q.shape[-1] ** -0.5, **options}
    if options.get("sinks"):
        settings["sinks"] = torch.linspace(-4, 9, case.q.shape[2]).to(case.q.dtype)
    return settings


def in_steps(case: Case, width: int, **settings: Any) -> Tensor:
    starts = range(0, case.q.shape[1], width)
    return torch.cat([attend(*case.tokens(start, start + width), **settings) for start in starts], 1)


@EACH_DTYPE
def test_attention_is_that_of_float64(dtype: torch.dtype) -> None:
    """With every head size, groups of heads, at the borders of blocks, with windows and soft caps."""
    for d in (7, 16, 33, 56, 64, 80, 96, 120, 128, 256, 512):
        check_attention(make_case(dtype, d=d, lengths=(0, 13, 40)))
    for heads, T in product(((2, 2), (3, 1), (8, 2), (14, 2), (9, 3)), (1, 2, 5, 17)):
        check_attention(make_case(dtype, heads=heads, T=T, lengths=(3, 29)))
    for length, T in product((0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65), (1, 2, 16, 17, 31)):
        check_attention(make_case(dtype, T=T, lengths=(length,)))
    check_attention(make_case(dtype, T=32, lengths=(64,)))  # up to the last slot
    check_attention(make_case(dtype, T=7, d=120, lengths=(89,)))
    for options, T in product(WINDOWS, (1, 4, 9)):
        check_attention(make_case(dtype, T=T, lengths=(0, 31, 64)), **options)
    for length in (CHUNK - 20, 2 * CHUNK - 20, 3 * CHUNK - 30):  # some rows see nothing of a chunk that others see
        check_attention(make_case(dtype, T=33, lengths=(length,), slots=4 * CHUNK), window=3)
    for factor in (1e-3, 30.0, 300.0) if dtype in (torch.float32, torch.float64) else ():
        case = make_case(dtype, T=3, lengths=(40,))  # scores far apart and far from zero: what underflows is no NaN
        check_attention(case._replace(q=case.q * factor))


@EACH_DTYPE
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"recent": 1}, {"softcap": 3.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize(("heads", "d"), [((4, 2), 16), ((3, 1), 80), ((7, 1), 64), ((2, 2), 120)])
def test_a_querys_bits_depend_on_nothing_beside_it(heads: Heads, d: int, options: dict, dtype: torch.dtype) -> None:
    """Step, batch, numbers of slots and threads, what lies in dead slots, and later tokens that are no numbers."""
    shape = {"T": 17, "heads": heads, "d": d, "lengths": (0, 30, CHUNK - 5)}
    case = make_case(dtype, **shape, slots=2 * CHUNK)
    settings = settings_of(case, options)
    out = attend(*case.fresh(), **settings)
    for b, width in product(range(3), (1, 2, 5, 16)):
        assert torch.equal(in_steps(case.row(b), width, **settings), out[b : b + 1])
    other = case.plain()
    dead = torch.arange(2 * CHUNK) >= (case.lengths + 17)[:, None]
    for cache in other[3:5]:
        cache.masked_fill_(dead[:, None, :, None], math.nan)
    assert torch.equal(attend(*other.packed(), **settings), out)
    large = make_case(dtype, **shape, slots=3 * CHUNK + 32).plain()
    for ours, theirs in zip(large[3:5], case.plain()[3:5], strict=True):
        ours[:, :, : 2 * CHUNK].copy_(theirs)
    assert torch.equal(attend(*case[:3], *large.packed()[3:], **settings), out)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(attend(*case.fresh(), **settings), out)
        for token, bad in product((0, 1, 5, 16), (math.nan, -math.inf)) if threads < 3 else ():
            spoilt = case._replace(k=case.k.clone(), v=case.v.clone())
            spoilt.k[:, token], spoilt.v[:, token] = bad, bad
            found = attend(*spoilt.fresh(), **settings)
            assert torch.equal(found[:, :token], out[:, :token]) and not found[:, token].isfinite().any()


@EACH_DTYPE
@pytest.mark.parametrize(
    "options", [{}, {"window": 170}, {"recent": 1}, {"recent": 150}, {"softcap": 3.0}, {"sinks": True}], ids=str
)
@pytest.mark.parametrize(("heads", "d"), [((6, 2), 16), ((2, 2), 40), ((14, 1), 24)])
def test_a_querys_bits_in_long_contexts_depend_on_nothing_beside_it(
    heads: Heads, d: int, options: dict, dtype: torch.dtype
) -> None:
    """Of several chunks, which threads share: steps that begin before, at and behind their borders."""
    lengths = (3 * CHUNK - 9, 2 * CHUNK, CHUNK - 1)
    case = make_case(dtype, T=16, heads=heads, d=d, lengths=lengths, slots=4 * CHUNK)
    settings = settings_of(case, options)
    check_attention(case, **options)
    out = attend(*case.fresh(), **settings)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(attend(*case.fresh(), **settings), out)
        for b, width in ((0, 1), (1, 2), (2, 5), (0, 11)) if threads == 2 else ((1, 9),):
            assert torch.equal(in_steps(case.row(b), width, **settings), out[b : b + 1])


def test_rounding_weights_costs_no_more_than_it_does_elsewhere() -> None:
    """bfloat16 against float64: the error is that of torch's own attention at most."""
    case = make_case(torch.bfloat16, T=8, heads=(9, 3), d=64, lengths=(2000,), slots=2048)
    wanted = attend_reference(*case.plain().double(), scale=0.125)
    theirs = attend_reference(*case.plain(), scale=0.125).double()
    ours = attend(*case.fresh(), scale=0.125).double()
    assert (ours - wanted).norm() < 1.1 * (theirs - wanted).norm()


@EACH_DTYPE
def test_attention_takes_slices_of_a_projection(dtype: torch.dtype) -> None:
    """Queries, keys and values as views of one tensor, and with heads that lie apart."""
    case = make_case(dtype, T=3, lengths=(5, 9))
    wanted = attend(*case.fresh(), scale=0.25)
    views = torch.cat(case[:3], 2).split((4, 2, 2), dim=2)
    assert not views[0].is_contiguous()
    apart = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in case[:3]]
    for q, k, v in (views, apart):
        assert torch.equal(attend(*case.fresh()._replace(q=q, k=k, v=v), scale=0.25), wanted)


@EACH_DTYPE
@pytest.mark.smoke
def test_slots_beyond_the_cache_are_not_written(dtype: torch.dtype) -> None:
    """Padding rows of a row that is full: they vanish, and the rows before them are right."""
    for length in (90, 95, 96, 200):
        case, num = make_case(dtype, T=9, lengths=(length, 3)), max(0, min(9, 96 - length))
        ours = case.fresh()
        out = attend(*ours, scale=0.25)
        assert torch.equal(attend(*case.row(1), scale=0.25), out[1:])
        if num:
            kept = case.row(0)
            assert torch.equal(attend(*kept.tokens(0, num), scale=0.25), out[:1, :num])
            assert all(map(torch.equal, kept[3:5], ours.row(0)[3:5]))
        else:
            assert all(map(torch.equal, case.row(0)[3:5], ours.row(0)[3:5]))
        assert torch.equal(ours.plain().v_cache[1, :, 12:], case.plain().v_cache[1, :, 12:])


@EACH_DTYPE
@pytest.mark.parametrize("d", [1, 7, 16, 40, 80])
def test_packing_keys_and_values_loses_nothing(d: int, dtype: torch.dtype) -> None:
    """New caches are such zeros, of slots that are rounded up."""
    plain = torch.randn(2, 2, 3, 2 * SLOT_MULTIPLE, d).to(dtype)
    assert torch.equal(torch.stack(unpack_kv(*pack_kv(*plain), d)), plain)
    empty = unpack_kv(*new_kv(2, 3, SLOT_MULTIPLE + 1, d, dtype, torch.device("cpu")), d)
    assert torch.equal(torch.stack(empty), torch.zeros_like(plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_of_a_path_move_to_the_front(dtype: torch.dtype) -> None:
    """Features move with the keys and values of an accepted path."""
    places = torch.randn(3, 20, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    lengths, num = torch.tensor([4, 0, 15]), torch.tensor([3, 5, 0])
    path = torch.tensor([[0, 2, 3, 4, 4], [0, 1, 2, 3, 4], [0, 1, 3, 4, 4]])
    ours, theirs, apart = places.clone(), places.clone(), places.mT.contiguous().mT
    compact_slots_reference(theirs, lengths, path, num)
    for rows in (ours, apart):
        compact_slots(rows, lengths, path, num)
        assert torch.equal(rows, theirs)
    assert torch.equal(ours[0, 4:7], places[0, [4, 6, 7]]) and torch.equal(ours[2], places[2])


# ---- linears


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
@pytest.mark.parametrize(("N", "K"), LINEARS)
def test_packed_linear_equals_linear_row_by_row(N: int, K: int, bias: bool, dtype: torch.dtype) -> None:
    """A row's bits depend on nothing next to it."""
    linear = make_linear(dtype, N, K, bias)
    packed, tolerance = PackedLinear(linear.weight, linear.bias), TOLERANCE[dtype]
    assert (packed.in_features, packed.out_features) == (K, N)
    x = inputs(dtype, 33, K)
    alone = torch.cat([packed(x[m : m + 1]) for m in range(33)])
    wanted = F.linear(x.double(), *(parameter.double() for parameter in linear.parameters()))
    assert alone.dtype == dtype
    torch.testing.assert_close(alone.double(), wanted, rtol=tolerance, atol=tolerance)
    for threads, widths in ((1, (*range(1, 20), 33)), (2, (1, 4, 33))):
        torch.set_num_threads(threads)
        for M in widths:
            assert torch.equal(packed(x[:M]), alone[:M]) and torch.equal(packed(x[-M:]), alone[-M:])
    assert torch.equal(packed(x[0]), alone[0])
    for apart in (x[:, None].transpose(0, 1), x.t().contiguous().t()[None], x.repeat(1, 2)[None, :, :K]):
        assert torch.equal(packed(apart), alone[None])


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
            assert torch.equal(packed(x[:M] * size), alone[:M]) and torch.equal(packed(x[-M:] * size), alone[-M:])
    assert (alone != 0).any()


def test_packed_linear_refuses_another_dtype() -> None:
    """The kernel would read the weights as numbers of another size."""
    linear = make_linear(torch.bfloat16, 16, 16)
    with pytest.raises(AssertionError, match="packed for torch.bfloat16, called with torch.float32"):
        PackedLinear(linear.weight, None)(inputs(torch.float32, 1, 16))


def test_pack_linears_replaces_linears_alone() -> None:
    class Special(nn.Linear):
        pass

    inner = nn.Sequential(nn.Linear(8, 8, bias=False))
    model = nn.Sequential(nn.Linear(4, 8), inner, Special(8, 8), nn.Linear(8, 4)).requires_grad_(False)
    x = inputs(torch.float32, 3, 4)
    wanted = model(x)
    assert pack_linears(model) == 3
    assert [type(m) for m in (model[0], inner[0], *model[2:])] == [PackedLinear, PackedLinear, Special, PackedLinear]
    torch.testing.assert_close(model(x), wanted)


@EACH_DTYPE
@pytest.mark.parametrize("rows", [(32, 16, 16), (16, 5), (7, 9, 3)])
def test_a_linear_of_parts_equals_one_of_all_rows(rows: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = inputs(dtype, sum(rows), 21)
    parts = [part.double() for part in weight.split(rows)]
    for same in (parts, [part.t().contiguous().t() for part in parts]):
        packed = PackedLinear.from_parts(same, None, dtype=dtype, zeros=HugePageArena().zeros)
        assert packed.is_settled and torch.equal(packed.weight, PackedLinear(weight, None).weight)
    assert torch.equal(packed.unpacked(), weight)


@EACH_DTYPE
def test_packing_finds_what_is_no_number(dtype: torch.dtype) -> None:
    weight, packed = inputs(dtype, 20, 7), torch.empty(packed_size(20, 7, dtype), dtype=dtype)
    for (n, k), bad in product(((0, 0), (19, 6), (15, 5)), (math.nan, math.inf, -math.inf)):
        weight[n, k] = torch.finfo(dtype).max
        pack_rows(weight, packed)
        weight[n, k] = bad
        with pytest.raises(NotFinite):
            pack_rows(weight, packed)
        weight[n, k] = 0


@EACH_DTYPE
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("N", "K", "group"), [(16, 32, 32), (40, 128, 64), (17, 96, 96), (100, 256, 128), (1, 64, 32)])
def test_low_linear_multiplies_rounded_activations(N: int, K: int, group: int, bits: int, dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(N)
    codes = torch.randint(0, 2**bits, (N, K), generator=dice, dtype=torch.uint8)
    scale, offset = (torch.randn(N, K // group, generator=dice).bfloat16() for _ in range(2))
    bias = inputs(dtype, N)
    low = QuantizedPackedLinear(codes, scale, offset, bias, bits)
    x = inputs(dtype, 9, K)
    x[4] = 0  # a group without any activation
    groups = x.double().view(9, -1, 32)
    step = groups.abs().amax(-1, keepdim=True) / {4: 127, 8: 2**15 - 1}[bits]
    rounded = ((groups / step).nan_to_num().round() * step).view(9, K)
    wide = [t.double().repeat_interleave(group, 1) for t in (scale, offset)]
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


@pytest.mark.parametrize(("compiler", "message"), COMPILERS.items())
def test_a_compiler_that_is_missing_or_fails_is_named(
    compiler: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(cpp_extension.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=message):
        cpp_extension.library.__wrapped__("float32")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing half-built is left"


def test_kernels_are_built_once_and_a_damaged_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a compiler that hands out the library built before, and notes that it was asked."""
    built, log, script = cpp_extension.library("float32")._name, tmp_path / "log", tmp_path / "c++"
    script.write_text(f'#!/bin/sh\necho asked >> "{log}"\nwhile [ "$1" != "-o" ]; do shift; done\ncp "{built}" "$2"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(cpp_extension, "library", functools.cache(cpp_extension.library.__wrapped__))

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
