"""Keys and values in 8 bits on CUDA: bits are those of the CPU's rounding, attention is that over numbers of codes.

Legend: B rows of the batch, T new tokens, K key/value heads, S slots, d head size.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compile.attention import TreeAttentionMask, append_kv, attend_reference
from compile.kv_layout import GROUP, MIN_SIZE, SLOT_MULTIPLE, q8_views, unpack_q8
from sharesd.models.layers import RMSNorm
from tests.compile.cpu.test_kv_q8 import in_numbers, rounded, spread
from tests.compile.cuda.test_cuda_attention import OPTIONS, PATHS, TREE, Step, branches_of, live, random_step, tables

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda.attention import SPLIT

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def check(step: Step, tree_mask: TreeAttentionMask | None = None, **options: Any) -> None:
    """Bits of the output and all numbers of the caches."""
    ours, theirs = step.in_8_bits(), in_numbers(step)
    assert torch.equal(live(ours, tree_mask, **options), live(theirs, tree_mask, **options))
    for part, other in zip(unpacked(ours), theirs[3:5], strict=True):
        assert torch.equal(part, other)


def unpacked(step: Step) -> tuple[Tensor, Tensor]:
    return unpack_q8(step.k_cache, step.v_cache, step.q.shape[3], step.q.dtype, plain=True)


@pytest.mark.thin
@DTYPES
@pytest.mark.parametrize("d", [16, 33, 80, 128])
def test_output_and_cache_are_those_of_the_rounded_numbers(d: int, dtype: torch.dtype) -> None:
    check(spread(random_step(3, 4, 2, d, 2 * SPLIT, [SPLIT - 2, 31], dtype)))


@pytest.mark.thin
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@PATHS
def test_sight_is_that_of_numbers(paths: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> None:
    step = random_step(7, 6, 2, 40, 3 * SPLIT, [SPLIT - 3, 2 * SPLIT + 50], torch.bfloat16)
    check(step, branches_of(paths, 2), **options)


@DTYPES
def test_output_is_near_that_of_float64(dtype: torch.dtype) -> None:
    step = random_step(7, 6, 2, 64, 2 * SPLIT, [SPLIT - 2], dtype)
    for tree_mask in (None, branches_of(TREE, 1)):
        out = live(step.in_8_bits(), tree_mask).double()
        both = (in_numbers(step).double(), step.double())
        wanted, unrounded = (attend_reference(*one, scale=0.125, tree_mask=tree_mask) for one in both)
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
        torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
        assert 0 < (out - unrounded).norm() < 0.02 * unrounded.norm()


@DTYPES
def test_norms_and_rotation_come_before_codes(dtype: torch.dtype) -> None:
    step = random_step(7, 4, 2, 40, SPLIT, [5, 90], dtype)
    norm = RMSNorm(40, 1e-6, False, dtype=dtype, device=step.q.device).requires_grad_(False)
    norm.weight.copy_(1 + 0.3 * torch.randn(40, generator=torch.Generator().manual_seed(0)))
    ours, plain = step.in_8_bits(), step.fresh()
    for one in (ours, plain):
        live(one, None, tables(97, 20, dtype), norms=(norm, norm))
    for part, numbers in zip(unpacked(ours), plain[3:5], strict=True):
        assert torch.equal(part, rounded(numbers))


@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_group_with_no_number_is_none(bad: float, dtype: torch.dtype) -> None:
    step = random_step(1, 1, 1, 80, SPLIT, [3], dtype)
    step.k[..., 3], step.v[..., 70] = bad, -bad
    wanted, ours = in_numbers(step), step.in_8_bits()
    for one in (wanted, ours):
        live(one)
    for part, numbers in zip(unpacked(ours), wanted[3:5], strict=True):
        assert torch.equal(part.isnan(), numbers.isnan()) and part.isnan().sum() in (GROUP, 80 - 2 * GROUP)


def test_halves_are_rounded_to_even_and_tiny_groups_are_zero() -> None:
    step = random_step(2, 1, 1, 96, SPLIT, [0])
    step.k[0, 0, 0], step.k[0, 1, 0] = 0, MIN_SIZE / 10
    step.k[0, 0, 0, 0], step.k[0, 0, 0, 40], step.k[0, 0, 0, 41] = 127, 1, -0.5
    ours = step.in_8_bits()
    live(ours)
    codes, scales = (view[0, 0, 0] for view in q8_views(ours.k_cache, 96))
    assert codes[0, [0, 40, 41]].tolist() == [127, 127, -64] and not codes[1].any()
    assert scales[0].tolist() == [1, pytest.approx(1 / 127), 0] and not scales[1].any()


@DTYPES
@pytest.mark.parametrize("d", [16, 80])
@pytest.mark.parametrize("blocks", [4, 3], ids=["whole", "view"])
def test_a_prompts_tokens_are_written_and_all_are_read_as_numbers(blocks: int, d: int, dtype: torch.dtype) -> None:
    T, n = 70, 20
    step, theirs = (random_step(T, 4, 2, d, 4 * SLOT_MULTIPLE, [n], dtype).in_8_bits() for _ in range(2))
    merged = torch.cat(step[:3], 2)
    k, v = merged[:, :, 4:6], merged[:, :, 6:]
    caches = [cache[:, :, :blocks] for cache in step[3:5]]
    found = torch.ops.sharesd.append_q8_(k, v, *caches, step.lengths, None, None)
    wanted = append_kv(k, v, *theirs[3:5], step.lengths, n + torch.arange(T)[None])
    S = blocks * SLOT_MULTIPLE
    for ours, other in zip(found, wanted, strict=True):
        assert ours.dtype == dtype and ours.shape == (1, 2, S, d)
        assert torch.equal(ours[:, :, : n + T], other[:, :, : n + T]) and not ours[:, :, n + T :].any()
    assert all(torch.equal(a, b) for a, b in zip(step[3:5], theirs[3:5], strict=True))


def test_nodes_of_a_tree_are_written_where_the_reference_writes_them() -> None:
    """Heads that are larger than what the kernels of steps take."""
    step = random_step(7, 2, 1, 320, SPLIT, [50]).in_8_bits()
    theirs, mask = step.fresh(), branches_of(TREE, 1)
    found = torch.ops.sharesd.append_q8_(step.k, step.v, *step[3:], *mask)
    slots_BT = 50 + mask.path_BTP.gather(2, mask.depth_BT[..., None])[..., 0]
    wanted = append_kv(*theirs[1:], slots_BT, mask)
    assert all(torch.equal(a, b) for a, b in zip(step[3:5], theirs[3:5], strict=True))
    assert all(torch.equal(a[:, :, :57], b[:, :, :57]) for a, b in zip(found, wanted, strict=True))
