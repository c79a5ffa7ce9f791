"""Keys and values in 8 bits: attention has the bits that it has over the numbers which the codes stand for."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from compile.attention import attend, attend_reference
from compile.kv_compact import kv_compactor
from compile.kv_layout import CHUNK, dequantize_kv, kv_layout, new_kv, pack_q8, quantize_kv, unpack_kv, unpack_q8
from sharesd.drafters.tables.proposal import pack
from tests.compile.cpu.test_kernels import EACH_DTYPE, TOLERANCE, Case, Heads, in_steps, make_case
from tests.speculation.test_trees import paths_of, random_tree


def spread(case: Any) -> Any:
    """The same with keys and values of very different sizes."""
    dice = torch.Generator().manual_seed(1)
    for x in case[1:5]:
        x.mul_(10 ** torch.randint(-3, 3, (*x.shape[:-1], 1), generator=dice).double())
    return case


def case_of_sizes(dtype: torch.dtype, **shape: Any) -> Case:
    """With caches [B, K, S, d]."""
    return spread(make_case(dtype, **shape).plain())


def rounded(x_BKSd: Tensor) -> Tensor:
    return dequantize_kv(*quantize_kv(x_BKSd), x_BKSd.dtype)


def in_8_bits(case: Case) -> Case:
    k_cache, v_cache = pack_q8(case.k_cache, case.v_cache)
    return case._replace(k_cache=k_cache, v_cache=v_cache)


def in_numbers(case: Case) -> Case:
    """With numbers that are rounded to 8 bits before."""
    k, v = (rounded(x.transpose(1, 2)).transpose(1, 2) for x in (case.k, case.v))
    return case._replace(k=k, v=v, k_cache=rounded(case.k_cache), v_cache=rounded(case.v_cache))


def check(case: Case, **options: Any) -> None:
    """Bits of the output and all numbers of the caches."""
    d, ours, wanted = case.q.shape[3], in_8_bits(case), in_numbers(case).packed()
    assert torch.equal(attend(*ours, scale=d**-0.5, **options), attend(*wanted, scale=d**-0.5, **options))
    for part, other in zip(unpack_q8(*ours[3:5], d, case.q.dtype), unpack_kv(*wanted[3:5], d), strict=True):
        assert torch.equal(part, other)


@EACH_DTYPE
@pytest.mark.parametrize("d", [1, 7, 16, 20, 32, 33, 64, 80, 120, 128, 256, 512])
def test_output_and_cache_are_those_of_the_rounded_numbers(d: int, dtype: torch.dtype) -> None:
    check(case_of_sizes(dtype, d=d, lengths=(0, 13, 40)))


@EACH_DTYPE
@pytest.mark.parametrize(
    "options", [{}, {"window": 33}, {"window": 170}, {"recent": 1}, {"recent": 150}, {"softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (14, 2)])
def test_long_contexts_windows_and_groups_of_heads(heads: Heads, options: dict, dtype: torch.dtype) -> None:
    lengths = (3 * CHUNK - 9, CHUNK - 1, 31)
    case = case_of_sizes(dtype, T=40, heads=heads, d=64, lengths=lengths, slots=4 * CHUNK)
    for T, threads in ((1, 3), (16, 3), (40, 1)):
        torch.set_num_threads(threads)
        check(case.tokens(0, T), **options)


@EACH_DTYPE
def test_a_rows_bits_depend_on_neither_width_nor_batch_nor_slots(dtype: torch.dtype) -> None:
    case = case_of_sizes(dtype, T=16, heads=(6, 2), d=64, lengths=(2 * CHUNK - 5, 30), slots=3 * CHUNK)
    whole = in_8_bits(case)
    out = attend(*whole, scale=0.125)
    for width in (1, 2, 5):
        cut = in_8_bits(case)
        assert torch.equal(in_steps(cut, width, scale=0.125), out) and all(map(torch.equal, cut, whole))
    for b in range(2):
        assert torch.equal(attend(*in_8_bits(case).row(b), scale=0.125), out[b : b + 1])


@EACH_DTYPE
def test_output_is_near_that_of_float64(dtype: torch.dtype) -> None:
    case = make_case(dtype, T=3, heads=(9, 3), d=64, lengths=(200,), slots=2 * CHUNK).plain()
    ours = attend(*in_8_bits(case), scale=0.125).double()
    wanted, unrounded = (attend_reference(*one.double(), scale=0.125) for one in (in_numbers(case), case.fresh()))
    torch.testing.assert_close(ours, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert 0 < (ours - unrounded).norm() < 0.02 * unrounded.norm()


@EACH_DTYPE
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"recent": 20}], ids=str)
def test_a_nodes_bits_are_those_of_its_path(options: dict[str, Any], dtype: torch.dtype) -> None:
    dice = random.Random(0)
    for length in (0, 31, CHUNK - 3, 2 * CHUNK - 9):
        proposal = random_tree(dice, 12)
        mask = pack([proposal], 12, "").tree_mask
        assert mask is not None
        case = case_of_sizes(dtype, T=13, heads=(6, 2), lengths=(length,), slots=3 * CHUNK)
        check(case, tree_mask=mask, **options)
        out = attend(*in_8_bits(case), scale=0.25, tree_mask=mask, **options)
        for row, path in enumerate(paths_of(proposal)):
            alone = Case(*(x[:, path] for x in case[:3]), *in_8_bits(case)[3:])
            assert torch.equal(attend(*alone, scale=0.25, **options)[:, -1], out[:, row])


@EACH_DTYPE
def test_accepted_slots_move_whole(dtype: torch.dtype) -> None:
    sizes, dice = (16, 80), torch.Generator().manual_seed(3)
    before = [torch.randn(2, 2, heads, 64, d, generator=dice).to(dtype) for heads, d in zip((2, 1), sizes, strict=True)]
    layers = [pack_q8(*pair) for pair in before]
    lengths, num = torch.tensor([27, 40]), torch.tensor([3, 1])
    path = torch.tensor([[0, 2, 5, 6, 6], [0, 4, 4, 4, 4]])
    kv_compactor([k for k, _ in layers], [v for _, v in layers], sizes, dtype)(lengths, path, num)
    for pair, old, size in zip(layers, before, sizes, strict=True):
        for cache, was in zip(unpack_q8(*pair, size, dtype), old, strict=True):
            wanted = rounded(was)
            wanted[0, :, 27:30] = wanted[0, :, [27, 29, 32]]
            assert torch.equal(cache, wanted)


@EACH_DTYPE
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_token_that_is_no_number_spoils_no_row_before_it(bad: float, dtype: torch.dtype) -> None:
    case = case_of_sizes(dtype, T=17, d=64, lengths=(0, 30, CHUNK - 5), slots=2 * CHUNK)
    wanted = attend(*in_8_bits(case), scale=0.125)
    for token in (0, 5, 16):
        spoilt = in_8_bits(case._replace(k=case.k.clone(), v=case.v.clone()))
        spoilt.k[:, token, :, 3], spoilt.v[:, token, :, 3] = bad, bad
        out = attend(*spoilt, scale=0.125)
        assert torch.equal(out[:, :token], wanted[:, :token])
        assert not out[:, token, :, :32].isfinite().any()


@EACH_DTYPE
def test_groups_are_scaled_alone_and_tiny_ones_are_zero(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, 32, 96, dtype=dtype)
    x[0, 0, 0, 0], x[0, 0, 0, 40], x[0, 0, 0, 41] = 127, 1, -0.5
    x[0, 0, 1, :] = 1e-31
    codes, scales = quantize_kv(x)
    assert codes[0, 0, 0, [0, 40, 41]].tolist() == [127, 127, -64]  # half of 127, to even
    assert scales[0, 0, 0].tolist() == [1, pytest.approx(1 / 127), 0] and not codes[0, 0, 1:].any()
    assert (rounded(x) - x).abs().amax() <= 0.5 / 127


def test_sizes_of_caches() -> None:
    for dtype, d in ((torch.bfloat16, 64), (torch.float32, 128), (torch.float64, 20)):
        caches = new_kv(2, 3, 40, d, dtype, torch.device("cpu"), q8=True)
        for tensor, layout in zip(caches, kv_layout(2, 3, 40, d, dtype, torch.device("cpu"), q8=True), strict=True):
            assert tensor.shape == layout.shape and tensor.dtype == layout.dtype == torch.int8 and not tensor.any()
        if d % 32 == 0:
            assert caches[0].nbytes == caches[1].nbytes == 2 * 3 * 64 * (d + d // 8)
