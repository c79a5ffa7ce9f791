"""The planner: published and computed examples, what fits and what does not, where blocks go."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from compile.adaptive_threads import STEP_THREADS
from offload.plan import DEPTHS, DoesNotFit, Limits, PlannedDrafter, Rates, Sizes, constant_acceptance, show_bytes
from offload.planner import make_plan
from sharesd.weights.backend import CpuBackend

GB = 10**9
QWEN = Sizes(blocks=(466 * 10**6,) * 28, fixed=int((1.09 + 1.09 + 0.13 + 0.85) * GB), host=0)
"""Qwen2.5-7B in bfloat16: head, embedding, KV of 2,048 tokens, and what libraries take."""
LLAMA = Sizes(blocks=(634 * 10**6,) * 40, fixed=int((1.68 + 0.66 + 1.9) * GB))
"""Llama-2-13B: KV of 2,048 tokens, embedding and head, libraries and activations."""
WIDE = Sizes(blocks=(56_033_280,) * 32, fixed=int((0.2265 + 0.14) * GB))
"""SmolLM2-135M widened to 1B."""
RATES = Rates(disk=GB, link=10 * GB, block={1: 0.003}, rest={1: 0.01})
SLOW = Rates(disk=GB / 2, block={1: 0.0028, 65: 0.006}, rest={1: 0.02, 65: 0.04})
ALPHAS = (0.975, 0.968, 0.90, 0.80)


def share(bits: int, resident: float, step: float, alpha: float) -> PlannedDrafter:
    size, held = int(resident * GB), constant_acceptance(alpha)
    return PlannedDrafter(name=f"{bits} bits", bits=bits, resident=size, step=step, cumulative_acceptance=held)


@pytest.mark.parametrize(
    ("link", "plain", "step", "speeds"),
    [
        (25, 2.75, 0.012, (25.9, 22.9, 11.7, 7.1)),
        (25, 2.75, 0.005, (38.3, 32.8, 14.4, 8.1)),
        (50, 5.35, 0.012, (34.6, 31.4, 18.1, 11.8)),
        (50, 5.35, 0.005, (55.6, 48.9, 24.0, 14.3)),
    ],
)
def test_7b_on_a_gpu_with_8_gib(link: int, plain: float, step: float, speeds: tuple[float, ...]) -> None:
    """Blocks at 1 TB/s; what else a pass takes follows from the figures: 5 ms with one row, 19 ms with many."""
    rates = Rates(link=link * GB, disk=GB, block={1: 0.466e-3, 65: 0.6e-3}, rest={1: 5e-3, 9: 19e-3, 65: 19e-3})
    limits = Limits(device=8 * 2**30, host=64 * GB)
    for alpha, speed in zip(ALPHAS, speeds, strict=True):
        plan = make_plan(QWEN, limits, rates, [share(4, 3.67 + 0.31, step, alpha)])
        assert plan.tokens_per_second == pytest.approx(speed, rel=0.05)
        assert plan.naive_tokens_per_second == pytest.approx(plain, rel=0.05)
        assert (len(plan.resident), len(plan.from_host), plan.from_disk) == (1, 27, ())
        assert plan.depth in DEPTHS and plan.device_bytes <= limits.device
    naive = make_plan(QWEN, limits, rates, [])
    assert (len(naive.resident), naive.depth) == (9, 0)
    assert naive.tokens_per_second == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize(("step", "speeds"), [(0.36, (0.88, 0.78, 0.40, 0.24)), (0.15, (1.31, 1.12, 0.50, 0.28))])
def test_13b_on_a_cpu_with_24_gb_from_a_disk(step: float, speeds: tuple[float, ...]) -> None:
    """Memory at 40 GB/s; half a second for what is resident follows from the figures."""
    rates = Rates(disk=GB, block={1: 0.0158, 9: 0.025, 65: 0.025}, rest={1: 0.02, 9: 0.08, 65: 0.08})
    for alpha, speed in zip(ALPHAS, speeds, strict=True):
        plan = make_plan(LLAMA, Limits(device=24 * GB), rates, [share(4, 7.2 + 0.09, step, alpha)])
        assert plan.tokens_per_second == pytest.approx(speed, rel=0.05)
        assert plan.naive_tokens_per_second == pytest.approx(0.13, rel=0.05)
        assert (len(plan.resident), plan.from_host, len(plan.from_disk)) == (17, (), 23)


def test_more_bits_win_where_the_link_is_slow() -> None:
    """Acceptance beats bytes: 2.4 times plain with 4 bits, 8 times with 8; but not if 4 bits hold nearly as often."""
    four, eight = share(4, 0.568, 0.028, 0.82), share(8, 1.01, 0.053, 0.984)
    plans = [make_plan(WIDE, Limits(device=1.6 * GB), SLOW, [drafter]) for drafter in (four, eight)]
    assert [plan.tokens_per_second for plan in plans] == [pytest.approx(1.77, rel=0.05), pytest.approx(5.87, rel=0.05)]
    assert plans[0].naive_tokens_per_second == pytest.approx(0.734, rel=0.05)
    both = make_plan(WIDE, Limits(device=1.6 * GB), SLOW, [four, eight])
    assert (both.bits, both.depth, both.tokens_per_second) == (8, 64, plans[1].tokens_per_second)
    assert "4 bits 1.7" in next(line.why for line in both.reasons if line.what == "drafts")
    small = make_plan(WIDE, Limits(device=1.2 * GB), SLOW, [four, eight])
    [why] = [line.why for line in small.reasons if line.what == "drafts"]
    assert small.bits == 4 and "8 bits needs --cpu-memory-limit of at least 1.49 GB" in why
    often = replace(four, cumulative_acceptance=constant_acceptance(0.968))
    assert make_plan(WIDE, Limits(device=1.6 * GB), SLOW, [often, eight]).bits == 4


def test_trees_where_rows_cost_little() -> None:
    """All nodes of a tree are verified, whatever its depth: where a pass waits for the link that costs nothing."""
    chain = share(4, 0.568, 0.028, 0.8)
    tree = replace(chain, name="trees", nodes=64, step=0.034, cumulative_acceptance=constant_acceptance(0.88))
    plan = make_plan(WIDE, Limits(device=1.2 * GB), SLOW, [chain, tree])
    assert (plan.drafter, plan.nodes) == ("trees", 64) and plan.depth <= 32
    assert plan.transfer_s == pytest.approx(len(plan.offloaded) * WIDE.blocks[0] * 2 / GB)
    tokens = sum(0.88**i for i in range(plan.depth + 1))
    took = plan.depth * 0.034 + plan.transfer_s + len(plan.resident) * 0.006 + 0.04
    assert plan.tokens_per_second == pytest.approx(tokens / took, rel=1e-3)
    dear = replace(SLOW, block={1: 0.0028, 65: 0.5})
    assert make_plan(WIDE, Limits(device=1.2 * GB), dear, [chain, tree]).nodes == 0


def test_what_fits_stays() -> None:
    need = WIDE.fixed + sum(WIDE.blocks)
    for limit in (need, math.inf):
        plan = make_plan(WIDE, Limits(device=limit), RATES, [])
        assert not plan.offloads and (plan.slots, plan.resident) == (0, tuple(range(32)))
    assert make_plan(WIDE, Limits(device=need - 1), RATES, []).offloads


def test_the_last_round_of_an_answer_seldom_has_room_for_all_that_it_confirms() -> None:
    rates = Rates(disk=0.5 * GB, block={1: 0.001, 65: 0.01}, rest={1: 0.02})
    for alpha, length in ((1.0, 63), (0.95, 63), (0.95, 5), (0.5, 20)):
        plan = make_plan(WIDE, Limits(device=1.6 * GB), rates, [share(8, 0.5, 0.02, alpha)])
        assert plan.tokens_per_second == pytest.approx((1 + sum(plan.cumulative_acceptance)) / plan.round_s)
        drawn = random.Random(0)
        rounds, tries = 0, 4000
        for _ in range(tries):
            left = length
            while left > 0:
                kept = next((num for num in range(plan.depth) if drawn.random() >= alpha), plan.depth)
                left, rounds = left - 1 - kept, rounds + 1
        assert plan.speed_of([length]) == pytest.approx(length * tries / rounds / plan.round_s, rel=0.02)
        assert plan.speed_of([5000]) == pytest.approx(plan.tokens_per_second, rel=0.01)
        both = (5 + length) / (5 / plan.speed_of([5]) + length / plan.speed_of([length]))
        assert plan.speed_of([5, length]) == pytest.approx(both)
        assert plan.speed_of([]) == plan.speed_of([0]) == plan.tokens_per_second
    plain = make_plan(WIDE, Limits(device=1.6 * GB), rates, [])
    assert plain.speed_of([7, 30]) == pytest.approx(plain.tokens_per_second)


def test_blocks_travel_at_even_distances_and_those_that_must_not_do_not() -> None:
    room = WIDE.fixed + (8 + 2) * WIDE.blocks[0]
    plan = make_plan(WIDE, Limits(device=room), RATES, [])
    assert plan.offloaded == plan.from_disk and len(plan.resident) == 8
    assert max(b - a for a, b in zip((-1, *plan.offloaded), (*plan.offloaded, 32), strict=True)) == 2
    keeps = replace(share(4, 0, 0.01, 0.9), resident_blocks=(0, 1, 2, 31))
    assert {0, 1, 2, 31} <= set(make_plan(WIDE, Limits(device=room), RATES, [keeps]).resident)
    with pytest.raises(DoesNotFit, match="4 bits: --cpu-memory-limit of at least 703 MB"):
        make_plan(WIDE, Limits(device=WIDE.fixed + 5 * WIDE.blocks[0]), RATES, [keeps])


def test_three_tiers() -> None:
    """What the host's memory does not hold comes from the disk through slots there, which counts at the slower rate."""
    limits = Limits(device=WIDE.fixed + (8 + 2) * WIDE.blocks[0], host=(14 + 2) * WIDE.blocks[0])
    plan = make_plan(WIDE, limits, RATES, [])
    assert (len(plan.from_host), len(plan.from_disk), plan.slots, plan.host_slots) == (14, 10, 2, 2)
    assert plan.host_bytes == limits.host and not set(plan.from_host) & set(plan.from_disk)
    assert 1 / plan.tokens_per_second == pytest.approx(10 * WIDE.blocks[0] / GB + 8 * 0.003 + 0.01)
    roomy = make_plan(WIDE, replace(limits, host=24 * WIDE.blocks[0]), RATES, [])
    assert (len(roomy.from_host), roomy.from_disk, roomy.host_slots) == (24, (), 0)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(device=0.3 * GB), "--cpu-memory-limit of at least 479 MB"),
        (Limits(device=0.3 * GB, host=8 * GB), "--gpu-memory-limit of at least 479 MB"),
        (Limits(device=GB, host=0.1 * GB), "--cpu-memory-limit of at least 113 MB"),
        (Limits(device=GB, disk=GB), "a disk with 1.8 GB free"),
        (Limits(device=GB, host=GB, disk=None), "--cpu-memory-limit of at least 1.29 GB"),
    ],
)
def test_the_smallest_limits_are_told_and_would_do(limits: Limits, message: str) -> None:
    with pytest.raises(DoesNotFit, match=message):
        make_plan(WIDE, limits, RATES, [])
    told = float(message.split()[-2]) * (1e6 if message.endswith("MB") else 1e9) if "least" in message else 1.8 * GB
    field = "disk" if "disk" in message else "device" if "--gpu" in message or limits.host is None else "host"
    assert make_plan(WIDE, replace(limits, **{field: told}), RATES, []).offloads


def test_blocks_of_different_bytes() -> None:
    """As few travel as a limit allows, slots hold the largest, and a pass reads what travels and no more."""
    large, small = 60 * 10**6, 40 * 10**6
    sizes = Sizes(blocks=(large, *[small] * 9, large, large), fixed=GB)
    rates = Rates(disk=GB, link=10 * GB, block={1: 0.001}, rest={1: 0.01})
    total = sum(sizes.blocks)
    plan = make_plan(sizes, Limits(device=GB + total), rates, [])
    assert not plan.offloads and plan.device_bytes == GB + total
    for limit in range(GB + 3 * large, GB + total, 7 * 10**6):
        plan = make_plan(sizes, Limits(device=limit), rates, [])
        stay = sum(sizes.blocks[block] for block in plan.resident)
        assert plan.device_bytes == GB + stay + plan.slots * large <= limit
        assert plan.device_bytes + large + small > limit
        assert plan.offloaded_bytes == total - stay == pytest.approx(plan.transfer_s * GB)
    host = make_plan(sizes, Limits(device=GB + 2 * large, host=5 * large), rates, [])
    assert len(host.offloaded) == 12 and host.host_bytes <= 5 * large
    assert host.host_bytes == sum(sizes.blocks[block] for block in host.from_host) + host.host_slots * large
    assert host.transfer_s == pytest.approx(sum(sizes.blocks[block] for block in host.from_disk) / GB)


def test_small_blocks_have_more_slots() -> None:
    """So that several megabytes are asked for at any time."""
    rates = Rates(disk=GB, block={1: 1e-4}, rest={1: 1e-3})
    tiny = Sizes(blocks=(2**20,) * 100, fixed=0)
    plan = make_plan(tiny, Limits(device=50 * 2**20), rates, [])
    assert (plan.slots, len(plan.resident)) == (17, 33)
    few = make_plan(replace(tiny, blocks=(2**20,) * 12), Limits(device=8 * 2**20), rates, [])
    assert (few.slots, len(few.resident)) == (3, 5)


def test_depth_is_limited() -> None:
    assert make_plan(WIDE, Limits(device=1.6 * GB), SLOW, [share(8, 1.01, 0.053, 0.984)], max_depth=10).depth == 8
    assert make_plan(WIDE, Limits(device=1.6 * GB), SLOW, [share(8, 1.01, 0.053, 0.01)]).depth == 0


@pytest.mark.parametrize(
    ("number", "shown", "limit"),
    [
        *((1_490_001, "1.49 MB", "1.5 MB"), (12.34e9, "12.3 GB", "12.4 GB")),
        *((703.2e6, "703 MB", "704 MB"), (7, "7 bytes", "7 bytes")),
    ],
)
def test_bytes_are_shown(number: float, shown: str, limit: str) -> None:
    assert (show_bytes(number), show_bytes(number, round_up=True)) == (shown, limit)


def test_products_are_timed_beside_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two threads each call is held up, with one another one in each sweep."""
    now, calls_made = 0.0, 0

    def call() -> None:
        nonlocal now, calls_made
        sweep, number = divmod(calls_made, 4)
        now += 1.0 if torch.get_num_threads() == 2 or number == sweep % 4 else 0.001
        calls_made += 1

    STEP_THREADS.reset(2)
    monkeypatch.setattr("sharesd.weights.backend.time.perf_counter", lambda: now)
    assert CpuBackend().time_calls([call] * 4) == pytest.approx(0.001) and torch.get_num_threads() == 2
    STEP_THREADS.fix(2)
    assert CpuBackend().time_calls([call] * 4) == pytest.approx(1.0)
    STEP_THREADS.reset()
