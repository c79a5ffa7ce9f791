"""Programmatic dependent launch: what makes it safe is seen in the code that is compiled for GPUs that have it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
from benchmark.gpu.shapes import LinearShape
from compile.cuda import (
    kv_compact,
    pdl,
    state_update,
    tree_verify,
)
from scripts.predicted_bandwidth import H100, compiled, plan_of
from tests.compile.cuda import test_cuda_attention, test_cuda_sampling
from tests.helpers.absent_gpu import Binary

MEMORY = re.compile(r"^\s*(@\S+ )?(ld|st|atom|red|cp|multimem)\.(?!param|shared)\S*", re.M)
WAITS, LETS = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def check(ptx: str) -> None:
    """One wait, in everybody's way; nothing but prefetches before it; the next kernel may begin behind it alone."""
    body = ptx[ptx.index(".entry") :]
    assert body.count(WAITS) == body.count(LETS) == 1
    before = body[: body.index(WAITS)]
    assert not MEMORY.findall(before), "memory is read or written too early"
    assert not re.search(r"\b(bra|ret|exit)\b", before), "somebody may end without having waited"
    assert body.index(WAITS) < body.index(LETS)


def test_what_is_checked() -> None:
    good = (
        f".entry k(){{ ld.param.b64 %r1, [p];\n prefetch.global.L2 [%r1];\n {WAITS};\n {LETS};\n ld.global.b32 %r2; }}"
    )
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


@pytest.mark.parametrize(
    "linear, bits",
    [
        (LinearShape(4096, 4096, norm=True), 16),
        (LinearShape(22016, 4096, norm=True, gated="silu"), 16),
        (LinearShape(576, 1536, bias=True), 16),  # split
        (LinearShape(576, 1536, norm=True), 8),
        (LinearShape(576, 1536, norm=True), 4),
        (LinearShape(151936, 1024, norm=True), 16),
    ],
    ids=str,
)
def test_products_wait_before_they_touch_memory(linear: LinearShape, bits: int) -> None:
    tile = plan_of(linear, bits, H100).tile
    made = compiled(linear, bits, tile, 90)
    check(made.ptx)
    assert ("atom" in made.ptx) == (tile.split > 1)
    if tile.split > 1:
        assert "atom.global.gpu.acq_rel.add" in made.ptx, "parts would not be seen by the program that joins them"


def test_other_kernels_have_no_part_in_it() -> None:
    """They begin when all before them has ended."""
    small = (
        state_update.verify_tokens_kernel,
        state_update.write_draft_token_kernel,
        state_update.append_tokens_kernel,
        state_update.rate_logits_kernel,
        state_update.commit_round_kernel,
    )
    for kernel in (tree_verify.accept_path_kernel, kv_compact.compact_kv_kernel, *small):
        assert "PDL" not in kernel.arg_names


def test_only_gpus_that_can_launch_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device == gpu else (8, 9))
    assert pdl.launch_options(gpu) == {"PDL": True, "launch_pdl": True}
    assert pdl.launch_options(torch.device("cuda", 0)) == {"PDL": False, "launch_pdl": False}
    assert pdl.launch_options(torch.device("cpu")) == {"PDL": False}
