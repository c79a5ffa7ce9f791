"""Kernels for keys and values in 8 bits, compiled for GPUs that are not there, and the operators that launch them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compile import attention, kv_append, kv_compact
from compile.attention import attend
from compile.kv_layout import new_kv
from tests.compile.cuda.test_cuda_attention import Noting, launches

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda.attention import PROGRAMS_PER_SM, SPLIT, slots_per_block
from compile.cuda.kv_compact import compact_kv
from compile.cuda.kv_q8 import expand_kv
from tests.helpers.absent_gpu import SHARED, count, gpu

slow = partial(pytest.param, marks=pytest.mark.slow)
PLACES = [(90, 128, 4), *(slow(*one) for one in ((80, 64, 3), (89, 80, 1), (90, 256, 2), (120, 128, 4)))]


@pytest.mark.parametrize("arch, d, G", PLACES)
def test_codes_are_loaded_while_a_block_is_multiplied(arch: int, d: int, G: int) -> None:
    turn, parts, _ = launches(arch, d, G, q8=True)
    for made in (turn, parts):
        assert made.spilled <= 8 * (d == 256) and made.shared <= SHARED[arch] * 1024, (made.name, made.spilled)
    D = 1 << (d - 1).bit_length()
    assert f"memdesc<2x{slots_per_block(D, torch.bfloat16)}x{D}xi8" in parts.ttgir
    assert count(parts.loop, "LDGSTS") and parts.resident() >= (PROGRAMS_PER_SM if D <= 128 else 1)


@pytest.mark.parametrize("arch", [90, slow(80), slow(120)])
def test_other_kernels_need_no_stack(arch: int) -> None:
    for d in (64, 80, 128):
        with gpu(arch) as made:
            caches = new_kv(2, 8, SPLIT, d, torch.bfloat16, torch.device("cuda"), q8=True)
            lengths, path = (torch.empty(shape, dtype=torch.int64, device="cuda") for shape in ((2,), (2, 7)))
            compact_kv(caches, lengths, d, lengths, path, lengths)
            expand_kv(*caches, lengths, 128, d, torch.bfloat16)
        assert [each.spilled for each in made] == [0, 0] and [each.grid for each in made] == [(2, 16), (4, 16)]


def test_one_binary_serves_all_steps() -> None:
    ways = ({}, {"T": 9}, {"S": 2048})
    assert len({launches(90, q8=True, **way)[1].ptx for way in ways}) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("flash", [False, True])
def test_a_prompt_is_written_and_expanded_by_one_operator(flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "supports_flash", lambda *_: flash)
    for module in (attention, kv_append):
        monkeypatch.setattr(module, "runs_triton", lambda device: True)
    calls = {}
    for T in (1, 100):
        with torch.no_grad(), torch.device("meta"):
            q, k = torch.empty(1, T, 6, 64, dtype=torch.bfloat16), torch.empty(1, T, 2, 64, dtype=torch.bfloat16)
            caches = new_kv(1, 2, 256, 64, torch.bfloat16, q.device, q8=True)
            with Noting() as noting:
                out = attend(q, k, k, *caches, torch.empty(1, dtype=torch.int64), scale=0.125)
        assert out.shape == q.shape and "aten::index_put_" not in noting.calls
        calls[T] = [name for name in noting.calls if name.startswith("sharesd::")]
    assert calls == {1: ["sharesd::attend_"], 100: ["sharesd::append_q8_", *(["sharesd::flash"] if flash else [])]}


def test_layers_of_equal_heads_are_compacted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_compact, "runs_triton", lambda device: True)
    with FakeTensorMode(), torch.device("cuda"):
        pairs = [new_kv(2, 3, SPLIT, 64, torch.bfloat16, torch.device("cuda"), q8=True) for _ in range(3)]
        keep = kv_compact.kv_compactor([k for k, _ in pairs], [v for _, v in pairs], [64] * 3, torch.bfloat16)
        with Noting() as noting:
            keep(*(torch.zeros(shape, dtype=torch.int64) for shape in ((2,), (2, 7), (2,))))
    assert noting.calls.count("sharesd::compact_kv_") == 1 and "aten::index_put_" not in noting.calls
