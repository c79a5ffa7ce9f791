"""Attention on CUDA: every row has the bits of plain decoding, only live slots are read, and every GPU can hold it.

Triton's interpreter runs the kernels on a CPU (`triton_cpu.py` mends its bfloat16), unless there is a GPU.

Legend: B rows of the batch, T new tokens, H query heads, K key/value heads, S slots, d head size.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from compile import attention
from compile.attention import TreeAttentionMask, attend, attend_reference, position_angles, rotate
from compile.kv_compact import kv_compactor
from compile.kv_layout import new_kv, pack_q8, unpack_q8
from sharesd.models.decoder import Attention
from sharesd.models.layers import RMSNorm
from tests.compile.cpu.test_kernels import Case
from tests.helpers.oracle import tiny_decoder

pytest.importorskip("triton")
from compile.cuda import attention as kernels
from compile.cuda import attention_step, pdl
from compile.cuda.attention import SPLIT, attend_live
from compile.cuda.gemm_config import Device
from compile.cuda.kv_compact import compact_kv
from compile.cuda.kv_q8 import expand_kv
from tests.helpers.absent_gpu import SHARED, Binary, count, gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
slow, BF16 = partial(pytest.param, marks=pytest.mark.slow), torch.bfloat16
long = partial(pytest.param, marks=pytest.mark.long)
OPTIONS = [{}, {"window": 140, "softcap": 3.0}, {"recent": 20}, {"recent": 20, "window": 9}]
OPTIONS += [{"sinks": torch.linspace(-4, 9, 6)}, {"sinks": torch.linspace(-4, 9, 6), "window": 140}]
TREE = ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4), (0, 1, 3, 5), (0, 2, 6))
CHAIN = tuple(tuple(range(row + 1)) for row in range(7))
PATHS = pytest.mark.parametrize("paths", [CHAIN, TREE], ids=["chain", "tree"])
Q8 = pytest.mark.parametrize("q8", [False, True], ids=["numbers", "8 bits"])
SHAPES = [(64, 3), (80, 1), (128, 4), (128, 1), (256, 2)]
PLACES = [(90, *shape, False) for shape in SHAPES]
PLACES += [((80, 86, 89, 120)[at % 4], *shape, False) for at, shape in enumerate([*SHAPES[2:], *SHAPES])]
MORE = [place for place in PLACES[len(SHAPES) + 4 :] if place[1:] != (128, 4, False)]
"""In the long tier: these GPUs have another shape above, and these shapes another GPU."""
PLACES += [(90, 128, 4, True), (80, 64, 3, True), (89, 80, 1, True), (90, 256, 2, True), (120, 128, 4, True)]
FAST = [*(place for place in PLACES if place[1:] == (128, 4, False)), (90, 128, 4, True)]


class Step(Case):
    """Inputs of one step, with caches [B, K, S, d]."""

    def in_8_bits(self) -> Step:
        """With caches quantized by tensor operations."""
        k_cache, v_cache = pack_q8(self.k_cache, self.v_cache, plain=True)
        return self._replace(k_cache=k_cache, v_cache=v_cache)

    def alone(self, b: int, path: tuple[int, ...], slots: int) -> Step:
        """The last row of a path in plain decoding: what is before it lies in the cache, in order; others are other."""
        n, (_, K, _, d) = int(self.lengths[b]), self.k_cache.shape
        caches = [torch.full((1, K, slots, d), fill, dtype=self.q.dtype) for fill in (7.5, -3.25)]
        before = list(path[:-1])
        for new, old, cache in zip(self[1:3], self[3:5], caches, strict=True):
            cache[0, :, :n] = old[b, :, :n]
            cache[0, :, n : n + len(before)] = new[b, before].transpose(0, 1)
        one = (x[b : b + 1, path[-1] : path[-1] + 1] for x in self[:3])
        return Step(*one, *caches, torch.tensor([n + len(before)]))


def random_step(T: int, H: int, K: int, d: int, S: int, lengths: list[int], dtype: torch.dtype = torch.float32) -> Step:
    dice, B = torch.Generator().manual_seed(d + T), len(lengths)
    shapes = ((B, T, H, d), (B, T, K, d), (B, T, K, d), (B, K, S, d), (B, K, S, d))
    return Step(*(torch.randn(shape, generator=dice).to(dtype) for shape in shapes), torch.tensor(lengths))


def branches_of(paths: tuple[tuple[int, ...], ...], batch: int) -> TreeAttentionMask | None:
    if paths is CHAIN:
        return None
    longest = max(map(len, paths))
    padded = [[*path, *[0] * (longest - len(path))] for path in paths]
    return TreeAttentionMask(torch.tensor([[len(path) - 1 for path in paths]] * batch), torch.tensor([padded] * batch))


def live(
    step: Step,
    tree_mask: TreeAttentionMask | None = None,
    rotary: Any = None,
    *,
    norms: Any = None,
    query_factors: Tensor | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention with tables of cosines and sines, RMSNorms of queries and keys, windows and the like."""
    places, turn = tree_mask or (None, None), rotary or (None, None)
    sight = {"window": 0, "recent": 0, "softcap": 0.0, **options}
    how = () if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps, norms[0].gemma)
    extent, more = (step.q.shape[3] ** -0.5, *sight.values()), {"query_factors": query_factors, "sinks": sinks}
    return attend_live(*step[:3], *turn, *step[3:], *places, *extent, *how, **more)


@pytest.mark.thin
@pytest.mark.interpreted
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@PATHS
def test_a_row_has_the_bits_of_plain_decoding(paths: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> None:
    """And sees what the reference sees."""
    step = random_step(7, 6, 2, 40, 3 * SPLIT, [SPLIT - 3, 2 * SPLIT + 50, 5])
    tree_mask = branches_of(paths, 3)
    wanted = attend_reference(*step.double(), scale=40**-0.5, tree_mask=tree_mask, **options)
    torch.testing.assert_close(live(step.fresh(), tree_mask, **options).double(), wanted, rtol=1e-5, atol=1e-5)
    for q8 in (False,) if options else (False, True):
        out = live(step.in_8_bits() if q8 else step.fresh(), tree_mask, **options)
        for b, row in ((0, 0), (0, 3), (1, 6)):
            alone = step.alone(b, paths[row], slots=(b + 2) * SPLIT)
            assert torch.equal(live(alone.in_8_bits() if q8 else alone, **options)[0, 0], out[b, row])


@pytest.mark.thin
@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize(
    "T, H, K, d", [(1, 4, 4, 32), (9, 8, 2, 64), (7, 3, 1, 80), (2, 7, 1, 128), (7, 2, 1, 256), (1, 71, 1, 64)]
)
def test_values_are_those_of_float64(T: int, H: int, K: int, d: int, dtype: torch.dtype) -> None:
    step = random_step(T, H, K, d, 2 * SPLIT, [SPLIT - 2], dtype)
    for tree_mask in [None, branches_of(TREE, 1)] if T == 7 else [None]:
        ours, exact = step.fresh(), step.double()
        out, wanted = live(ours, tree_mask), attend_reference(*exact, scale=d**-0.5, tree_mask=tree_mask)
        assert out.dtype == dtype
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, BF16: 1.6e-2}[dtype]
        torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
        assert all(torch.equal(a.double(), b) for a, b in zip(ours[3:5], exact[3:5], strict=True))


@pytest.mark.interpreted
def test_long_texts_are_joined_in_groups() -> None:
    S = (kernels.GROUP + 2) * SPLIT
    step = random_step(3, 1, 1, 16, S, [S - SPLIT - 1])
    for options in ({}, {"recent": 200}, {"window": 200}):
        out, wanted = live(step.fresh(), **options), attend_reference(*step.double(), scale=0.25, **options)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(live(step.alone(0, (0, 1, 2), S), **options)[0, 0], out[0, 2])


@pytest.mark.interpreted
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"recent": 40}], ids=str)
def test_what_is_not_seen_is_not_read(options: dict[str, int]) -> None:
    n, T, S = 4 * SPLIT + 20, 7, 6 * SPLIT
    step = random_step(T, 4, 2, 16, S, [n])
    hidden = torch.zeros(S, dtype=torch.bool)
    hidden[n + T :] = True
    if options:
        hidden[SPLIT if "recent" in options else 0 : 3 * SPLIT] = True
    for tree_mask in (None, branches_of(TREE, 1)):
        clean, poisoned = step.fresh(), step.fresh()
        for cache in poisoned[3:5]:
            cache[:, :, hidden] = math.nan
        assert torch.equal(live(clean, tree_mask, **options), live(poisoned, tree_mask, **options))


@pytest.mark.interpreted
@Q8
@PATHS
def test_a_row_that_takes_no_part_reads_and_writes_nothing(paths: tuple[tuple[int, ...], ...], q8: bool) -> None:
    step = random_step(7, 6, 2, 40, 2 * SPLIT, [SPLIT - 3, -2])  # its last tokens would have slots
    step = step.in_8_bits() if q8 else step
    turn, tree_mask = tables(2 * SPLIT, 8, torch.float32), branches_of(paths, 2)
    wanted = live(Step(*(x[:1].clone() for x in step)), branches_of(paths, 1), turn)
    for part in step[:5]:
        part[1].view(torch.int8).fill_(-1)  # NaN, as are scales
    out = live(step, tree_mask, turn)
    assert torch.equal(out[:1], wanted) and not out[1].any()
    assert all((cache[1].view(torch.int8) == -1).all() for cache in step[3:5])


@pytest.fixture
def in_any_order(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The programs of a launch run in an order from a seed, so that each is the last to arrive some time."""
    if not INTERPRETED:
        pytest.skip("a GPU has its own order")
    from triton.runtime.interpreter import interpreter_builder as builder

    place = builder.set_grid_idx

    def shuffle(seed: int) -> None:
        def anywhere(x: int, y: int, z: int) -> None:
            order = torch.randperm(builder.grid_dim[0], generator=torch.Generator().manual_seed(seed + 7 * y))
            place(int(order[x]), y, z)

        monkeypatch.setattr(builder, "set_grid_idx", anywhere)

    return shuffle


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "T, K, dtype, options",
    [(1, 2, BF16, {}), (3, 1, torch.float32, {"window": 140, "softcap": 3.0}), (2, 2, torch.float16, {"recent": 20})],
    ids=str,
)
def test_one_launch_has_the_bits_of_three(
    T: int, K: int, dtype: torch.dtype, options: dict[str, Any], in_any_order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With norms, rotation, factors and sinks, an idle row, an empty and an almost full cache; any program may be last.

    Memory between programs holds NaN before: what is not written is not read, or of no use.
    """
    d, S = 24, 4 * SPLIT
    step = heads_of(random_step(T, 4, K, d, S, [2 * SPLIT - 1, -2, S - 1, 0], dtype))
    norms = [RMSNorm(d, 1e-6, False, dtype=dtype, device=step.q.device).requires_grad_(False) for _ in range(2)]
    for seed, norm in enumerate(norms):
        norm.weight.copy_(1 + 0.3 * torch.randn(d, generator=torch.Generator().manual_seed(seed)))
    factors = torch.linspace(1, 2, S).to(dtype)
    sinks = torch.linspace(-4, 9, 4) if K == 1 else None
    more = {"rotary": tables(S, d // 2, dtype), "norms": norms, "query_factors": factors, "sinks": sinks, **options}

    new_empty = Tensor.new_empty

    def unwritten(*args: Any, **options: Any) -> Tensor:
        made = new_empty(*args, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", unwritten)
    with mock.patch.object(kernels, "MAX_HEADS", 0), mock.patch.object(kernels, "attend_step", None):
        three = step.fresh()
        wanted = live(three, **more)
    monkeypatch.setattr(kernels, "attend_parts", None)
    elsewhere = torch.zeros_like(step.lengths)
    other = attention_step.arrivals(elsewhere).fill_(1)
    for seed in range(3):
        in_any_order(seed)
        one = step.fresh()
        assert torch.equal(live(one, **more), wanted)
        assert all(map(torch.equal, one[3:5], three[3:5]))
        assert not attention_step.arrivals(one.lengths).any(), "as the next launch wants them"
    assert (other == 1).all(), "programs of another model's launch have arrived, which runs at the same time"
    other.zero_()


def heads_of(step: Step) -> Step:
    """With queries, keys and values side by side, as a merged linear gives them."""
    heads = torch.cat(step[:3], 2)
    return Step(*heads.split([x.shape[2] for x in step[:3]], 2), *step[3:])


def tables(positions: int, r: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.arange(positions * r, dtype=torch.float32).view(positions, r)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.interpreted
@pytest.mark.parametrize("r, dtype", [(8, BF16), (8, torch.float16), (5, torch.float16), (0, torch.float32)])
def test_rotation_rounds_as_the_plain_one(dtype: torch.dtype, r: int) -> None:
    step = heads_of(random_step(7, 4, 2, 16, SPLIT, [5, 90], dtype))
    rotary = tables(94, r, dtype) if r else None  # the last rows lie behind the last position
    for tree_mask in (None, branches_of(TREE, 2)):
        ours, theirs = step.fresh(), step.fresh()
        if rotary is not None:
            turn = position_angles(rotary, 7, step.lengths, tree_mask)
            theirs = theirs._replace(q=rotate(step.q, *turn), k=rotate(step.k, *turn))
        assert torch.equal(live(ours, tree_mask, rotary), live(theirs, tree_mask))
        attend_reference(*theirs, scale=0.25, tree_mask=tree_mask)
        assert all(torch.equal(a, b) for a, b in zip(ours[3:5], theirs[3:5], strict=True))
        if rotary is not None:
            factors, fresh = torch.linspace(1, 2, 94).to(dtype), step.fresh()
            of_each = position_angles((factors, factors), 7, step.lengths, tree_mask)[0][..., None, None]
            found = live(fresh, tree_mask, rotary, query_factors=factors)
            assert torch.equal(found, live(theirs._replace(q=theirs.q * of_each), tree_mask))
            assert torch.equal(fresh.k_cache, ours.k_cache)


@pytest.mark.thin
@pytest.mark.interpreted
@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize(
    "d, dtype",
    [(40, BF16), (16, torch.float16), (40, torch.float16), (24, torch.float32)],
)
def test_norms_of_heads_round_as_separate_ones(dtype: torch.dtype, d: int, gemma: bool) -> None:
    """The sums of squares may be added in another order, which halves seldom show; a row's bits are its own."""
    step = heads_of(random_step(7, 4, 2, d, SPLIT, [5, 90], dtype))
    step.q[0, 0, 0] = 0
    norms = [RMSNorm(d, 1e-6, gemma, dtype=dtype, device=step.q.device).requires_grad_(False) for _ in range(2)]
    for seed, norm in enumerate(norms):
        norm.weight.copy_(1 + 0.3 * torch.randn(d, generator=torch.Generator().manual_seed(seed)))
    rotary, both = tables(97, d // 2, dtype), (norms[0], norms[1])
    for tree_mask in (None, branches_of(TREE, 2)):
        ours = step.fresh()
        theirs = step._replace(q=norms[0](step.q), k=norms[1](step.k)).fresh()
        out, want = live(ours, tree_mask, rotary, norms=both), live(theirs, tree_mask, rotary)
        for got, wanted in ((out, want), (ours.k_cache, theirs.k_cache)):
            torch.testing.assert_close(got, wanted)
            if dtype != torch.float32:
                assert (got == wanted).double().mean() > 0.99
        assert torch.equal(ours.v_cache, theirs.v_cache)
    together, cut = step.fresh(), step.fresh()
    whole = live(together, None, rotary, norms=both)
    for first, end in ((0, 1), (1, 2), (2, 5), (5, 7)):
        part = Step(*(x[:, first:end] for x in step[:3]), *cut[3:5], step.lengths + first)
        assert torch.equal(live(part, None, rotary, norms=both), whole[:, first:end])
    assert all(torch.equal(a, b) for a, b in zip(cut[3:5], together[3:5], strict=True))


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype, gemma", [(BF16, False), (BF16, True), (torch.float32, True)], ids=str)
def test_normalised_and_rotated_keys_are_those_of_float64(dtype: torch.dtype, gemma: bool) -> None:
    """But for the roundings on the way: after the norm, its weight, the cosine, and the sum."""
    n, T, d = 90, 5, 64
    step, dice = random_step(T, 4, 2, d, SPLIT, [n], dtype), torch.Generator().manual_seed(1)
    norm = RMSNorm(d, 1e-5, gemma, dtype=dtype, device=step.q.device).requires_grad_(False)
    norm.weight.copy_(1 + 0.3 * torch.randn(d, generator=dice))
    rotary = tables(n + T, d // 2, dtype)
    live(step, None, rotary, norms=(norm, norm))
    wide, (cos, sin) = step.k.double(), (x[n:, None].double() for x in rotary)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    wanted = rotate(wide, *(x.transpose(0, 1) for x in (cos, sin)))
    a, b = wide.abs().chunk(2, -1)
    large = torch.cat([a * cos.abs() + b * sin.abs(), b * cos.abs() + a * sin.abs()], -1)
    error = (step.k_cache[:, :, n : n + T].transpose(1, 2).double() - wanted).abs()
    roundings = 8 if dtype == torch.float32 else 4.1
    assert (error <= roundings * torch.finfo(dtype).eps / 2 * large).all()


@pytest.mark.interpreted
@Q8
def test_rows_behind_the_cache_are_not_written(q8: bool) -> None:
    step = random_step(7, 4, 2, 16, SPLIT, [SPLIT - 3])
    stored = step.in_8_bits() if q8 else step
    memory = torch.full((2, 3, *stored.k_cache.shape[1:]), 2, dtype=stored.k_cache.dtype)
    caches = [both[1:2].copy_(cache) for both, cache in zip(memory, stored[3:5], strict=True)]  # of the middle one of 3
    live(step._replace(k_cache=caches[0], v_cache=caches[1]))
    assert (memory[:, [0, 2]] == 2).all()
    assert q8 or torch.equal(caches[0][0, :, SPLIT - 3 :], step.k[0, :3].transpose(0, 1))


@pytest.mark.interpreted
@pytest.mark.parametrize("q8, d", [(False, 24), (True, 24), (True, 80)])
def test_kept_rows_are_moved_together_in_all_layers(q8: bool, d: int) -> None:
    dice = torch.Generator().manual_seed(3)
    numbers = [torch.randn(2, 3, SPLIT, d, generator=dice) for _ in range(4)]
    caches = [pack_q8(x, x, plain=True)[0] if q8 else x.clone() for x in numbers]
    wanted = [unpack_q8(x, x, d, torch.float32, plain=True)[0] if q8 else x.clone() for x in caches]
    lengths, num = torch.tensor([27, 40]), torch.tensor([4, 1])
    path = torch.tensor([[0, 2, 3, 6, 6, 6, 6], [0, 4, 4, 4, 4, 4, 4]])
    compact_kv(caches, torch.tensor([cache.data_ptr() for cache in caches]), d, lengths, path, num)
    for cache, was in zip(caches, wanted, strict=True):
        was[0, :, 27:31] = was[0, :, [27, 29, 30, 33]]
        assert torch.equal(unpack_q8(cache, cache, d, torch.float32, plain=True)[0] if q8 else cache, was)


# ---- on GPUs that are not there


def launches(
    arch: int,
    d: int = 128,
    G: int = 4,
    *,
    T: int = 1,
    S: int = 4096,
    full: bool = False,
    q8: bool = False,
    at_once: bool = False,
    sinks: bool = False,
) -> list[Binary]:
    """The three kernels of a step of eight key/value heads, with rotary embedding and norms of heads.

    `full`: in float32, with soft caps. `at_once`: the one kernel."""
    dtype, softcap = (torch.float32, 30.0) if full else (BF16, 0.0)
    with (
        gpu(arch) as made,
        mock.patch.object(kernels, "device", lambda index: Device("none", 132, 0)),
        mock.patch.object(kernels, "MAX_HEADS", 8 * at_once),
        mock.patch.object(kernels, "arrivals", lambda lengths: lengths.new_empty(8, dtype=torch.int32)),
    ):
        empty = partial(torch.empty, dtype=dtype, device="cuda")
        new = (empty(1, T, 8 * G, d), empty(1, T, 8, d), empty(1, T, 8, d), *(empty(S, d // 2) for _ in range(2)))
        caches = new_kv(1, 8, S, d, dtype, torch.device("cuda"), q8=q8)
        lengths = torch.empty(1, dtype=torch.int64, device="cuda")
        attend_live(
            *new,
            *caches,
            lengths,
            None,
            None,
            d**-0.5,
            0,
            0,
            softcap,
            empty(d),
            empty(d),
            1e-5,
            sinks=empty(8 * G) if sinks else None,
        )
    assert len(made) == (1 if at_once else 3)
    return made


def test_attention_lets_its_successor_begin_early_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pdl.VARIABLE, "early")
    for each in (*launches(90, 64, 3), *launches(90, 64, 3, at_once=True)):
        assert 0 < each.ptx.index("griddepcontrol.launch_dependents") < each.ptx.index("griddepcontrol.wait")


@pytest.mark.parametrize(
    "arch, d, G, q8", [one if one in FAST else long(*one) if one in MORE else slow(*one) for one in PLACES]
)
def test_parts_have_loads_in_flight(arch: int, d: int, G: int, q8: bool) -> None:
    """While a block is multiplied, the next one's keys and values are on their way; nothing lies on the stack."""
    made = launches(arch, d, G, q8=q8)
    for each in made:
        assert each.spilled <= 8 * (d == 256) and each.shared <= SHARED[arch] * 1024, (each.name, each.spilled)
        assert ("griddepcontrol.wait" in each.ptx) == (arch >= 90)
    parts, D, stored = made[1], 1 << (d - 1).bit_length(), "i8" if q8 else "bf16"
    assert f"memdesc<2x{kernels.slots_per_block(D, BF16)}x{D}x{stored}" in parts.ttgir
    waits = [int(num) for num in re.findall(r"async_wait.*?num = (\d+)", parts.ttgir)]
    assert q8 or waits.count(3) == 2, "two waits in the loop leave three loads in flight"
    assert count(parts.loop, "LDGSTS") and parts.resident() >= (kernels.PROGRAMS_PER_SM if D <= 128 else 1)


def loop_of(kernel: Binary) -> list[str]:
    """Floating-point operations of the loop over blocks with layouts, as far as sums of a row depend on them."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", kernel.ttgir, re.M))
    found = []
    for line in kernel.ttgir.splitlines():
        line = line.partition(" loc(")[0]
        if match := re.search(r"(tt\.dot|math\.\w+|arith\.\w+f|}\)).* : (\(?tensor<16x.*)", line):
            found.append(match[1] + re.sub(r"#\w+", lambda name: layouts.get(name[0], ""), match[2]))
    return found


@pytest.mark.parametrize(
    "arch, d, G", [(90, 128, 4), *(long(*one) for one in ((90, 64, 3), (80, 128, 1), (120, 80, 2)))]
)
def test_one_launch_multiplies_in_the_layouts_of_three(arch: int, d: int, G: int) -> None:
    """A row's sums have one order only where products and sums lie alike in registers; what else is added is not by
    layout. Loads of the join are in flight together; nothing is spilled; stores come before the arrival.
    """
    (step,), (_, parts, _) = launches(arch, d, G, at_once=True), launches(arch, d, G)
    wanted = loop_of(parts)
    assert [sum(kind in one for one in wanted) for kind in ("tt.dot", "})")] == [2, 2]
    assert not Counter(wanted) - Counter(loop_of(step))
    assert not step.spilled and step.resident() >= kernels.PROGRAMS_PER_SM and step.shared <= SHARED[arch] * 1024
    (arrival,) = re.findall(r"atom\.\S+", step.ptx)
    assert arrival == "atom.global.gpu.acq_rel.add.u32"
    before, after = step.ptx.split(arrival)
    assert before.rindex("bar.sync") > before.rindex("st.global"), "all have stored before one arrives"
    assert "ld.global.cg" not in before and "ld.global.cg" in after
    assert after.index("bar.sync") < after.index("ld.global.cg"), "and read past the arrival that came last"
    loads = [code for _, code in step.sass if re.search(r"\bLDG\S*STRONG|MUFU\.EX2", code)]
    runs = max(len(run.split()) for run in " ".join("L" if "LDG" in code else "x" for code in loads).split("x"))
    assert runs >= 2 * attention_step.AT_ONCE, "in flight together"


@pytest.mark.parametrize("arch", [90, *map(slow, (80, 86, 89, 120))])
def test_sinks_need_no_stack(arch: int) -> None:
    made = [each for at_once in (False, True) for each in launches(arch, 64, 8, at_once=at_once, sinks=True)]
    assert len(made) == 4 and not any(each.spilled for each in made)


@pytest.mark.parametrize(
    "arch, d, G", [(90, 64, 3), *(slow(*one) for one in ((80, 128, 4), (86, 96, 1), (89, 256, 2), (120, 128, 1)))]
)
def test_parts_of_float32(arch: int, d: int, G: int) -> None:
    parts = launches(arch, d, G, full=True)[1]
    assert parts.shared <= SHARED[arch] * 1024 and parts.spilled <= 32, (parts.shared, parts.spilled)
    assert "tf32" not in parts.ptx, "float32 is multiplied as such"


@Q8
def test_one_binary_serves_all_steps(q8: bool) -> None:
    ways: tuple[dict[str, Any], ...] = ({}, {"T": 9}, {"T": 16, "S": 2048}, {"S": 1000})
    assert len({launches(90, q8=q8, **way)[1].ptx for way in ways}) == 1
    if not q8:
        assert len({launches(90, **way, at_once=True)[0].ptx for way in ({}, {"T": 4}, {"S": 1000})}) == 1


@pytest.mark.parametrize("arch", [90, slow(80), slow(120)])
def test_other_kernels_need_no_stack(arch: int) -> None:
    for d, q8 in ((80, False), (64, True), (80, True), (128, True)):
        with gpu(arch) as made:
            caches = new_kv(2, 8, SPLIT, d, BF16, torch.device("cuda"), q8=q8)
            lengths, path = (torch.empty(shape, dtype=torch.int64, device="cuda") for shape in ((2,), (2, 7)))
            compact_kv(caches, lengths, d, lengths, path, lengths)
            if q8:
                expand_kv(*caches, lengths, 128, d, BF16)
        assert not any(each.spilled for each in made) and [each.grid for each in made] == [(2, 16), (4, 16)][: 1 + q8]


def test_programs_are_those_that_have_work() -> None:
    """Grids of 132 processors, whatever the cache: two on each, and in trees those of new rows."""
    assert kernels.count_programs(1, 4, False, 16, 8, 132) == (16, 16), "a program for each part of a short cache"
    assert kernels.count_programs(1, 4, False, 256, 8, 132) == (33, 33)
    assert kernels.count_programs(9, 4, False, 1024, 8, 132) == (3 * 11, 11)
    assert kernels.count_programs(16, 4, True, 256, 8, 132) == (4 * 8 + 16 * 2, 8), "512 of a tree once, with 256 parts"
    assert kernels.count_programs(64, 4, True, 256, 8, 132) == (16 * 2 + 64 * 2, 2)
    assert kernels.count_programs(200, 4, True, 256, 64, 132) == (50 + 200 * 3, 1)


@pytest.mark.interpreted
@pytest.mark.parametrize("processors", [1, 6, 1000])
def test_bits_do_not_depend_on_the_number_of_programs(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step, masks = random_step(7, 4, 2, 16, 5 * SPLIT, [4 * SPLIT - 3]), (None, branches_of(TREE, 1))
    wanted = [live(step.fresh(), tree_mask) for tree_mask in masks]
    monkeypatch.setattr(kernels, "device", lambda index: Device("none", processors, 0))
    assert all(map(torch.equal, [live(step.fresh(), tree_mask) for tree_mask in masks], wanted))


class Noting(TorchDispatchMode):
    """The names of all operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens, tree", [(1, False), (7, True)])
def test_a_step_attends_by_one_operator(tokens: int, tree: bool) -> None:
    config = tiny_decoder(0).config
    size, r = (2, config.num_key_value_heads, 256, config.head_dim), config.head_dim // 2
    with torch.no_grad(), FakeTensorMode(), torch.device("cuda"):
        tree_mask = [torch.empty(shape, dtype=torch.int64) for shape in ((2, 7), (2, 7, 4))] if tree else []
        attention = Attention(config, config.layer_types[0], dtype=BF16, device="cuda")
        x_BTD = torch.empty(2, tokens, config.hidden_size, dtype=BF16)
        turn = (torch.empty(99, r, dtype=BF16) for _ in range(2))
        caches = (torch.empty(size, dtype=BF16) for _ in range(2))
        with Noting() as noting:
            out_BTD = attention(x_BTD, *turn, *caches, torch.empty(2, dtype=torch.int64), *tree_mask)
    assert out_BTD.shape == x_BTD.shape and out_BTD.device.type == "cuda"
    assert noting.calls.count("sharesd::attend_") == 1
    assert not {"aten::cat", "aten::mul", "aten::index_put_"} & set(noting.calls)


@Q8
def test_kept_rows_move_by_one_operator(q8: bool) -> None:
    with FakeTensorMode(), torch.device("cuda"):
        pairs = [new_kv(2, 3, SPLIT, 64, BF16, torch.device("cuda"), q8=q8) for _ in range(3)]
        keep = kv_compactor([k for k, _ in pairs], [v for _, v in pairs], [64] * 3, BF16)
        with Noting() as noting:
            keep(*(torch.zeros(shape, dtype=torch.int64) for shape in ((2,), (2, 7), (2,))))
    assert noting.calls.count("sharesd::compact_kv_") == 1 and "aten::index_put_" not in noting.calls


@pytest.mark.parametrize("flash", [False, True])
def test_a_prompt_is_written_and_expanded_by_one_operator(flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "supports_flash", lambda *_: flash)
    monkeypatch.setattr(attention, "runs_triton", lambda device: True)
    calls = {}
    for T in (1, 100):
        with torch.no_grad(), torch.device("meta"):
            q, k = torch.empty(1, T, 6, 64, dtype=BF16), torch.empty(1, T, 2, 64, dtype=BF16)
            caches = new_kv(1, 2, 256, 64, BF16, q.device, q8=True)
            with Noting() as noting:
                out = attend(q, k, k, *caches, torch.empty(1, dtype=torch.int64), scale=0.125)
        assert out.shape == q.shape and "aten::index_put_" not in noting.calls
        calls[T] = [name for name in noting.calls if name.startswith("sharesd::")]
    assert calls == {1: ["sharesd::attend_"], 100: ["sharesd::append_q8_", *(["sharesd::flash"] if flash else [])]}
