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
from compile.kv_layout import (
    CHUNK,
    GROUP,
    MIN_SIZE,
    dequantize_kv,
    kv_layout,
    new_kv,
    pack_kv,
    pack_q8,
    quantize_kv,
    unpack_kv,
    unpack_q8,
)
from sharesd.speculation.draft_tree import pack
from tests.compile.cpu.test_kernels import EACH_DTYPE, TOLERANCE, keep_threads
from tests.speculation.test_trees import paths_of, random_tree

__all__ = ["keep_threads"]


class Call:
    """Random inputs; caches [B, K, S, d] are full of old numbers, live or not."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        T: int = 5,
        heads: tuple[int, int] = (4, 2),
        d: int = 16,
        lengths: tuple[int, ...] = (7,),
        slots: int = 96,
    ) -> None:
        dice = torch.Generator().manual_seed(0)
        B, (H, K) = len(lengths), heads

        def numbers(*shape: int) -> Tensor:
            sizes = 10 ** torch.randint(-3, 3, (*shape[:-1], 1), generator=dice).double()
            return (torch.randn(shape, generator=dice, dtype=torch.float64) * sizes).to(dtype)

        self.q = torch.randn((B, T, H, d), generator=dice, dtype=torch.float64).to(dtype)
        self.k, self.v = numbers(B, T, K, d), numbers(B, T, K, d)
        self.caches = numbers(B, K, slots, d), numbers(B, K, slots, d)
        self.lengths, self.scale = torch.tensor(lengths), d**-0.5

    def in_8_bits(self, **options: Any) -> tuple[Tensor, list[Tensor]]:
        """Output and caches."""
        caches = list(pack_q8(*self.caches))
        return self.run(caches, **options), caches

    def run(self, caches: list[Tensor], first: int = 0, end: int | None = None, **options: Any) -> Tensor:
        """Output of new rows `first` to before `end`."""
        q, k, v = (x[:, first:end] for x in (self.q, self.k, self.v))
        return attend(q, k, v, *caches, self.lengths + first, scale=self.scale, **options)

    def in_numbers(self, **options: Any) -> tuple[Tensor, list[Tensor]]:
        """The same with numbers that are rounded to 8 bits before."""
        caches = list(pack_kv(*(rounded(cache) for cache in self.caches)))
        k, v = (rounded(x.transpose(1, 2)).transpose(1, 2) for x in (self.k, self.v))
        return attend(self.q, k, v, *caches, self.lengths, scale=self.scale, **options), caches


def rounded(x_BKSd: Tensor) -> Tensor:
    return dequantize_kv(*quantize_kv(x_BKSd), x_BKSd.dtype)


def check(call: Call, **options: Any) -> None:
    """Bits of the output and all numbers of the caches."""
    (ours, codes), (wanted, numbers) = call.in_8_bits(**options), call.in_numbers(**options)
    assert torch.equal(ours, wanted)
    d = call.q.shape[3]
    for part, other in zip(unpack_q8(codes[0], codes[1], d, call.q.dtype), unpack_kv(*numbers, d), strict=True):
        assert torch.equal(part, other)


@EACH_DTYPE
@pytest.mark.parametrize("d", [1, 7, 16, 20, 32, 33, 64, 80, 120, 128, 256, 512])
def test_output_and_cache_are_those_of_the_rounded_numbers(d: int, dtype: torch.dtype) -> None:
    check(Call(dtype, d=d, lengths=(0, 13, 40)))


@EACH_DTYPE
@pytest.mark.parametrize(
    "options", [{}, {"window": 33}, {"window": 170}, {"recent": 1}, {"recent": 150}, {"softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (14, 2)])
def test_long_contexts_windows_and_groups_of_heads(
    heads: tuple[int, int], options: dict[str, Any], dtype: torch.dtype
) -> None:
    for T, threads in ((1, 3), (4, 1), (16, 3), (40, 1)):
        torch.set_num_threads(threads)
        check(Call(dtype, T=T, heads=heads, d=64, lengths=(3 * CHUNK - 9, CHUNK - 1, 31), slots=4 * CHUNK), **options)


@EACH_DTYPE
def test_a_rows_bits_depend_on_neither_width_nor_batch_nor_slots(dtype: torch.dtype) -> None:
    call = Call(dtype, T=16, heads=(6, 2), d=64, lengths=(2 * CHUNK - 5, 30), slots=3 * CHUNK)
    out, caches = call.in_8_bits()
    for width in (1, 2, 5):
        other = list(pack_q8(*call.caches))
        parts = [call.run(other, first, min(16, first + width)) for first in range(0, 16, width)]
        assert torch.equal(torch.cat(parts, 1), out)
        assert all(map(torch.equal, other, caches))
    for b in range(2):
        alone = [cache[b : b + 1].clone() for cache in pack_q8(*call.caches)]
        row = (x[b : b + 1] for x in (call.q, call.k, call.v))
        assert torch.equal(attend(*row, *alone, call.lengths[b : b + 1], scale=call.scale), out[b : b + 1])


@EACH_DTYPE
def test_output_is_near_that_of_float64(dtype: torch.dtype) -> None:
    call = Call(dtype, T=3, heads=(9, 3), d=64, lengths=(200,), slots=2 * CHUNK)
    call.k, call.v = torch.randn(1, 3, 3, 64).to(dtype), torch.randn(1, 3, 3, 64).to(dtype)
    caches = [torch.randn(1, 3, 2 * CHUNK, 64).to(dtype) for _ in range(2)]
    call.caches = caches[0], caches[1]
    ours = call.in_8_bits()[0].double()
    exact = [rounded(x).double() for x in caches]
    k, v = (rounded(x.transpose(1, 2)).transpose(1, 2).double() for x in (call.k, call.v))
    wanted = attend_reference(call.q.double(), k, v, exact[0], exact[1], call.lengths, scale=call.scale)
    torch.testing.assert_close(ours, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    unrounded = attend_reference(
        *(x.double() for x in (call.q, call.k, call.v, *caches)), call.lengths, scale=call.scale
    )
    assert 0 < (ours - unrounded).norm() < 0.02 * unrounded.norm()


@EACH_DTYPE
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"recent": 20}], ids=str)
def test_a_nodes_bits_are_those_of_its_path(options: dict[str, Any], dtype: torch.dtype) -> None:
    dice = random.Random(0)
    for length in (0, 31, CHUNK - 3, 2 * CHUNK - 9):
        proposal = random_tree(dice, 12)
        mask = pack([proposal], 12, "").tree_mask
        assert mask is not None
        call = Call(dtype, T=13, heads=(6, 2), lengths=(length,), slots=3 * CHUNK)
        check(call, tree_mask=mask, **options)
        out, _ = call.in_8_bits(tree_mask=mask, **options)
        for row, path in enumerate(paths_of(proposal)):
            alone = Call(dtype, T=13, heads=(6, 2), lengths=(length,), slots=3 * CHUNK)
            alone.q, alone.k, alone.v = (x[:, path] for x in (call.q, call.k, call.v))
            assert torch.equal(alone.in_8_bits(**options)[0][:, -1], out[:, row])


@EACH_DTYPE
def test_accepted_slots_move_whole(dtype: torch.dtype) -> None:
    sizes, dice = (16, 80), torch.Generator().manual_seed(3)
    before = [
        [torch.randn(2, heads, 64, size, generator=dice).to(dtype) for _ in range(2)]
        for heads, size in zip((2, 1), sizes, strict=True)
    ]
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
    call = Call(dtype, T=17, d=64, lengths=(0, 30, CHUNK - 5), slots=2 * CHUNK)
    wanted, _ = call.in_8_bits()
    for token in (0, 5, 16):
        spoilt = Call(dtype, T=17, d=64, lengths=(0, 30, CHUNK - 5), slots=2 * CHUNK)
        spoilt.k[:, token, :, 3], spoilt.v[:, token, :, 3] = bad, bad
        out, _ = spoilt.in_8_bits()
        assert torch.equal(out[:, :token], wanted[:, :token])
        assert not out[:, token, :, :GROUP].isfinite().any()


@EACH_DTYPE
def test_groups_are_scaled_alone_and_tiny_ones_are_zero(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, 32, 96, dtype=dtype)
    x[0, 0, 0, 0], x[0, 0, 0, 40], x[0, 0, 0, 41] = 127, 1, -0.5
    x[0, 0, 1, :] = MIN_SIZE / 10
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
