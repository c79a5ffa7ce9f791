"""Products compiled for GPUs that are not there, in the tiles of the rule: enough in flight, nothing done twice.

Programmatic dependent launch: what makes it safe is seen in the code.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
from benchmark.gpu.shapes import MODELS, LinearShape
from compile.cuda import kv_compact, pdl, state_update, tree_verify
from compile.cuda.gemm_config import ROWS, Device, Tile, by_rule
from scripts import predicted_bandwidth as predicted
from scripts.predicted_bandwidth import A100, H100, RTX4090, LaunchPlan, PredictedCard, compiled, plan_of
from tests.compile.cuda import test_cuda_attention, test_cuda_sampling
from tests.helpers.absent_gpu import SHARED, Binary, count

LARGE = MODELS[:-1]
BY_ARCH = {card.arch: card for card in predicted.CARDS}
BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
slow, long = pytest.mark.slow, pytest.mark.long
COVERED = [  # each kind of loop, each GPU with each number of bits
    (90, 16, "qkv", 1), (90, 16, "gate_up", 1), (90, 8, "gate_up", 2), (90, 8, "o", 3), (90, 4, "qkv", 1),
    (90, 4, "gate_up", 2), (90, 4, "down", 0), (80, 16, "down", 2), (80, 8, "qkv", 0), (80, 4, "gate_up", 1),
    (86, 16, "gate_up", 3), (86, 4, "o", 2), (86, 8, "down", 1), (89, 16, "o", 0), (89, 8, "gate_up", 1),
    (89, 4, "down", 1), (120, 16, "qkv", 2), (120, 8, "down", 3), (120, 4, "gate_up", 1), (80, 4, "down", 4),
]  # fmt: skip
FAST = COVERED[3:7]
SIZES = [  # 70B; the smallest Qwen2.5 and its head; other types of numbers
    (57344, 8192, BF16, {"norm": True, "gated": "silu"}), (8192, 28672, BF16, {}), (151936, 896, BF16, {"norm": True}),
    (1152, 896, BF16, {"norm": True, "bias": True}), (896, 4864, BF16, {}), (128256, 4096, HALF, {}),
    (4096, 14336, HALF, {}), (576, 1536, FULL, {}), (3072, 576, FULL, {"norm": True, "gated": "silu"}),
    (6144, 4096, FULL, {"norm": True}), (28672, 4096, FULL, {"norm": True, "gated": "silu"}),
    (49152, 576, FULL, {"norm": True}),
]  # fmt: skip
PLACES = [(90, size) for size in SIZES] + [((80, 86, 89, 120)[at % 4], size) for at, size in enumerate(SIZES)]
MEMORY = re.compile(r"^\s*(@\S+ )?(ld|st|atom|red|cp|multimem)\.(?!param|shared)\S*", re.M)
WAITS, LETS = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
SMALL, NORMED = LinearShape(576, 1536, bias=True), LinearShape(576, 1536, norm=True)  # the first in 16 bits is split
EARLY = [(LinearShape(4096, 4096, norm=True), 16), (LinearShape(151936, 1024, norm=True), 16), (NORMED, 8), (NORMED, 4)]
EARLY += [(LinearShape(22016, 4096, norm=True, gated="silu"), 16), (SMALL, 16), (SMALL, 8)]


def fitting(plan: LaunchPlan, card: PredictedCard, bits: int) -> int:
    """Programs whose buffers fit the shared memory of a processor."""
    tile, factors = plan.tile, 4 * plan.tile.outputs * 4 if bits == 4 else 0
    inputs = ROWS * 2 * tile.inputs * (4 if bits == 4 else 1)
    return (SHARED[card.arch] + 1) * 1024 // ((tile.stages - 1) * (plan.step_bytes + inputs + factors) + 2048)


@pytest.mark.parametrize("card", [H100, A100, RTX4090], ids=lambda card: card.name)
@pytest.mark.parametrize("model", LARGE, ids=lambda model: model.name)
def test_enough_is_in_flight(model: Any, card: PredictedCard) -> None:
    for bits, (name, linear) in product((16, 8, 4), model.linears.items()):
        plan = plan_of(linear, bits, card)
        fit = fitting(plan, card, bits)
        assert plan.in_flight(card, fit) >= card.wanted_in_flight, (name, bits, plan)
        assert card is not H100 or plan.in_flight(card, fit) >= 32 * 1024, (name, bits, plan)
        if bits < 16 and card is not H100:  # there, tiles are those that were measured
            assert plan.programs >= 1.45 * card.processors and fit >= 2, (name, bits, plan)
        assert plan.programs * plan.steps * plan.step_bytes <= 1.13 * plan.nbytes, "steps behind the end"


def test_tiles_depend_on_weights_and_device_only() -> None:
    h100 = H100.device
    assert by_rule(4096, 4096, 16, 0, h100) == Tile(64, 256, 2, 4, 4)
    assert by_rule(22016, 4096, 16, 0, h100) == Tile(64, 256, 1, 4, 4)
    assert by_rule(576, 1536, 16, 0, h100) == Tile(32, 256, 3, 4, 4)
    assert by_rule(4096, 11008, 4, 64, h100) == Tile(128, 64, 4, 6, 4), "43 steps in parts of 11"
    assert by_rule(22016, 4096, 4, 64, h100) == Tile(128, 64, 2, 3, 4), "three programs for each processor"
    assert by_rule(28672, 4096, 4, 64, A100.device) == Tile(64, 64, 1, 3, 4)
    assert by_rule(576, 576, 4, 32, h100).inputs == 32
    for group in (32, 64, 128, 256):
        tile = by_rule(4096, 4096, 4, group, Device("none", 132, 227 * 1024))
        assert tile.outputs == 128 and group % tile.inputs == 0 and tile.inputs <= predicted.GROUP


def test_the_slower_of_bytes_and_instructions_decides() -> None:
    plan = LaunchPlan(Tile(64, 64, 1, 4, 4), programs=264, steps=10, step_bytes=8192, nbytes=264 * 10 * 8192)
    bytes_s = plan.nbytes / (0.9 * H100.bandwidth)
    assert predicted.predicted_s(plan, H100, 100, 3) == pytest.approx(1.6e-6 + bytes_s)
    busy = predicted.predicted_s(plan, H100, 1000, 3)
    assert busy == pytest.approx(1.6e-6 + 10 * 2 * 1000 / 0.8 / H100.clock), "two programs on each processor"
    assert predicted.predicted_s(plan, H100, 1000, 1) > 1.5 * busy, "one after the other, and one alone issues less"
    split = replace(plan, tile=replace(plan.tile, split=2))
    assert predicted.predicted_s(split, H100, 1000, 3) == pytest.approx(busy + 0.5e-6)


@pytest.mark.parametrize(
    "arch, bits, name, model",
    [one if one in FAST else pytest.param(*one, marks=slow if one[0] == 90 else long) for one in COVERED],
)
def test_products_do_nothing_twice(arch: int, bits: int, name: str, model: int) -> None:
    """No spills, no plain loads in the loop, each matrix instruction once, and more weights than memory delivers."""
    card, linear = BY_ARCH[arch], MODELS[model].linears[name]
    plan = plan_of(linear, bits, card)
    tile = plan.tile
    made = compiled(linear, bits, tile, arch)
    assert made.spilled == 0 and made.shared <= SHARED[arch] * 1024, (tile, made.spilled, made.shared)
    assert plan.in_flight(card, made.resident()) >= card.wanted_in_flight or model == 4
    made = compiled(replace(linear, inputs=8192 * 8), bits, replace(tile, split=1), arch)
    assert made.loop and count(made.loop, "LDG") == 0, "something in the loop is not fetched ahead of its use"
    wanted = tile.outputs // 16 * (ROWS // 8) * (tile.inputs * (4 if bits == 4 else 1) // 16)
    if count(made.loop, "HGMMA"):  # 64 rows and all columns at once
        assert count(made.loop, "HGMMA") * 8 == wanted, "warps multiply the same"
    else:
        assert count(made.loop, "HMMA") * tile.warps == wanted, "warps multiply the same"
    cycles = len(made.loop) * tile.warps / 4  # of a step, if each scheduler issues an instruction a cycle
    assert plan.step_bytes / cycles * card.clock * card.processors > card.bandwidth, len(made.loop)


@pytest.mark.parametrize(
    "arch, size",
    [pytest.param(*one, marks=() if at in (1, 8) else slow if at >= 12 else long) for at, one in enumerate(PLACES)],
)
def test_products_of_other_sizes(arch: int, size: tuple[int, int, torch.dtype, dict[str, Any]]) -> None:
    outputs, inputs, dtype, how = size
    linear, bits = LinearShape(outputs, inputs, **how), 32 if dtype == FULL else 16
    made = compiled(linear, bits, plan_of(linear, bits, BY_ARCH[arch]).tile, arch, dtype)
    assert made.shared <= SHARED[arch] * 1024 and made.spilled == 0, (made.shared, made.spilled)
    assert "tf32" not in made.ptx, "float32 is multiplied as such"


def table() -> dict[tuple[str, str], dict[str, str]]:
    with predicted.FILE.open(encoding="utf-8") as file:
        return {(row["card"], row["model"]): row for row in csv.DictReader(file)}


def test_aims_of_the_table() -> None:
    rows = table()
    assert set(rows) == {(card.name, model.name) for card in predicted.UNMEASURED for model in MODELS}
    for (_, model), row in rows.items():
        if model in ("Llama-2-7B", "Llama-3.1-8B", "Qwen2.5-7B"):
            assert float(row["share_16"]) >= 0.85
            assert float(row["ratio_4"]) <= 0.31


@pytest.mark.slow
def test_the_table_is_what_is_predicted() -> None:
    for card, model in ((A100, MODELS[1]), (RTX4090, MODELS[3])):
        row, (full_s, share) = table()[card.name, model.name], predicted.layer(model, 16, card)
        low_s, low_share = predicted.layer(model, 4, card)
        assert (row["share_16"], row["share_4"]) == (f"{share:.2f}", f"{low_share:.2f}")
        assert row["ratio_4"] == f"{low_s / full_s:.2f}"


def test_one_kernel_stands_for_all_sizes() -> None:
    linear, tile = LinearShape(4096, 4096), plan_of(LinearShape(4096, 4096), 16, RTX4090).tile
    one = predicted.loop_of(linear, 16, tile, 89)
    assert one is predicted.loop_of(replace(linear, outputs=11008), 16, replace(tile, split=4), 89)


def check(ptx: str) -> None:
    """One wait, in everybody's way; nothing but prefetches before it; only after it may the next kernel begin."""
    body = ptx[ptx.index(".entry") :]
    assert body.count(WAITS) == body.count(LETS) == 1
    before = body[: body.index(WAITS)]
    assert not MEMORY.findall(before), "memory is read or written too early"
    assert not re.search(r"\b(bra|ret|exit)\b", before), "somebody may end without having waited"
    assert body.index(WAITS) < body.index(LETS)


def test_what_is_checked() -> None:
    good = f".entry k(){{ ld.param.b64 %r1, [p];\n prefetch.global.L2 [p];\n {WAITS};\n {LETS};\n ld.global.b32 %r; }}"
    check(good)
    early = "\n ld.global.b32 %r3, [%r1];\n"
    for bad in (
        good.replace(f"{WAITS};\n {LETS}", f"{LETS};\n {WAITS}"),
        good.replace(f" {WAITS}", f"{early} {WAITS}"),
        good.replace(f" {WAITS}", f" @%p1 bra $L1;\n {WAITS}"),
        good.replace(WAITS, "nop"),
    ):
        with pytest.raises(AssertionError):
            check(bad)


@pytest.mark.parametrize(
    "launches", [test_cuda_attention.launches, test_cuda_sampling.launches], ids=["attention", "sampling"]
)
def test_kernels_wait_before_they_touch_memory(launches: Callable[[int], list[Binary]]) -> None:
    for made in launches(90):
        check(made.ptx)


@pytest.mark.parametrize("linear, bits", [*EARLY, pytest.param(SMALL, 4, marks=slow)], ids=str)
def test_products_wait_before_they_touch_memory(linear: LinearShape, bits: int) -> None:
    tile = plan_of(linear, bits, H100).tile
    made = compiled(linear, bits, tile, 90)
    check(made.ptx)
    assert all(code in made.ptx for code in ("prefetch.global.L2", "mma", "cp.async"))
    assert ("atom" in made.ptx) == (tile.split > 1)
    if tile.split > 1:
        assert "atom.global.gpu.acq_rel.add" in made.ptx, "parts would not be seen by the program that joins them"
    if linear is SMALL:
        assert made.spilled == 0
        assert "griddepcontrol" not in compiled(linear, bits, plan_of(linear, bits, A100).tile, 80).ptx


def test_other_kernels_have_no_part_in_it() -> None:
    """They begin when all before them has ended."""
    names = ("verify_tokens", "write_draft_token", "append_tokens", "rate_logits", "commit_round", "join_late_nodes")
    small = (getattr(state_update, f"{name}_kernel") for name in names)
    for kernel in (tree_verify.accept_path_kernel, kv_compact.compact_kv_kernel, *small):
        assert "PDL" not in kernel.arg_names


def test_only_gpus_that_can_launch_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device == gpu else (8, 9))
    assert pdl.launch_options(gpu) == {"PDL": True, "launch_pdl": True}
    assert pdl.launch_options(torch.device("cuda", 0)) == {"PDL": False, "launch_pdl": False}
    assert pdl.launch_options(torch.device("cpu")) == {"PDL": False}
