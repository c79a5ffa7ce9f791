"""Attention of prompts on a GPU, computed on a CPU: what flash attention is asked for, masks without copies of keys.

Legend: T new tokens, H query heads, K key/value heads, S slots, d head size.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compile import attention
from compile.attention import append_kv, attend, attend_reference, supports_flash
from sharesd.kvcache.static import StaticKVCache

S, K, G, D = 192, 2, 3, 16


def flash(q_THd: Tensor, k_SKd: Tensor, v_SKd: Tensor, *rest: Any, scale: float, **sight: Any) -> tuple[Tensor, ...]:
    """As torch documents `_flash_attention_forward` for texts of any lengths, of which there is one."""
    bounds_q, bounds_k, most_q, most_k, dropout, causal, debug = rest
    left, right, used = sight["window_size_left"], sight["window_size_right"], int(sight["seqused_k"])
    assert bounds_q.tolist() == [0, most_q] == [0, len(q_THd)] and bounds_k.tolist() == [0, most_k] == [0, len(k_SKd)]
    assert (dropout, causal, debug, right) == (0.0, True, False, 0)
    k_SKd, v_SKd = k_SKd[:used], v_SKd[:used]
    ahead_TS = torch.arange(used) - (torch.arange(most_q)[:, None] + used - most_q)
    seen_TS = (ahead_TS <= 0) & (ahead_TS >= -(used if left is None else left))
    q, k, v = (x.transpose(0, 1) for x in (q_THd, k_SKd, v_SKd))
    scores_HTS = (q @ k.repeat_interleave(G, 0).transpose(1, 2) * scale).masked_fill(~seen_TS, -torch.inf)
    out_HTd = F.scaled_dot_product_attention(q, k, v, seen_TS, scale=scale, enable_gqa=True)
    return (out_HTd.transpose(0, 1), scores_HTS.logsumexp(-1), q)


def step(T: int) -> list[Tensor]:
    """New queries, keys and values, and both caches."""
    dice = torch.Generator().manual_seed(T)
    sizes = ((1, T, G * K, D), (1, T, K, D), (1, T, K, D), (1, K, S, D), (1, K, S, D))
    return [torch.randn(*size, generator=dice, dtype=torch.float64) for size in sizes]


def test_flash_attention_sees_what_the_reference_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    for length, window, sinks in product((0, 37), (0, 40), (None, torch.linspace(-4, 9, G * K))):
        ours, theirs, lengths_B = step(100), step(100), torch.tensor([length])
        append_kv(*ours[1:], lengths_B, lengths_B[:, None] + torch.arange(100))
        out = attention._flash(ours[0], *ours[3:], (lengths_B + 100).to(torch.int32), 0.25, window, sinks)
        wanted = attend_reference(*theirs, lengths_B, scale=0.25, window=window, sinks=sinks)
        torch.testing.assert_close(out, wanted)
        assert all(map(torch.equal, ours[3:], theirs[3:])), "both have written the same"


def test_flash_attention_takes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_flash", lambda device: True)
    gpu, half = torch.device("cuda", 0), torch.bfloat16
    assert supports_flash(gpu, half, 128, 0.0) and supports_flash(gpu, torch.float16, 256, 0.0)
    assert not supports_flash(torch.device("cpu"), half, 128, 0.0)
    for dtype, size, softcap in ((torch.float32, 128, 0.0), (half, 512, 0.0), (half, 60, 0.0), (half, 128, 30.0)):
        assert not supports_flash(gpu, dtype, size, softcap)


def test_old_gpus_have_no_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for capability, has in (((7, 5), False), ((8, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert attention.has_flash(torch.device("cuda", 0)) is has


@pytest.mark.parametrize("named", [None, "another"])
def test_another_torch_has_sdpa_and_one_warning(
    named: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator that is missing, and one with an argument of another name."""
    taken = [*attention.FLASH_PLACES, *sorted(attention.FLASH_NAMES - {"seqused_k"}), named]
    schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in taken])
    operators = SimpleNamespace()
    if named is not None:
        operators._flash_attention_forward = SimpleNamespace(default=SimpleNamespace(_schema=schema))
    monkeypatch.setattr(torch.ops, "aten", operators)
    assert not attention._knows_flash()
    monkeypatch.setattr(attention, "KNOWS_FLASH", False)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not supports_flash(torch.device("cuda", 0), torch.bfloat16, 128, 0.0)
    attention.warn_unknown_flash.cache_clear()
    for _ in range(2):
        attention.warn_unknown_flash()
    said = f"torch {torch.__version__} has another flash attention: prompts run SDPA, which takes more time"
    assert [record.message for record in caplog.records if "SDPA" in record.message] == [said]


def test_masks_take_groups_of_heads_without_copies_of_keys() -> None:
    q, _, _, k, v = step(100)
    seen_BTS = torch.arange(S) <= torch.arange(100)[:, None] + 20
    want = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, seen_BTS, scale=0.25, enable_gqa=True)
    found = attention._attend_in_groups(q, k, v, seen_BTS[None], 0.25)
    torch.testing.assert_close(found, want.transpose(1, 2))


def test_a_piece_reads_its_row_in_whole_where_attention_reads_live_slots() -> None:
    """A view of other slots would be another shape, for which another form would be compiled."""
    for whole in (False, True):
        options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "plain": True, "whole_rows": whole}
        cache = StaticKVCache(shapes=[(1, 8)], batch=2, slots=128, **options)
        assert cache.row(1, 64).slots == (128 if whole else 64)


def test_prompts_take_flash_attention_and_drafts_that_look_back_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "supports_flash", lambda *_: True)
    monkeypatch.setattr(attention, "reads_live_slots", lambda *_: False)
    monkeypatch.setattr(attention, "attend_reference", lambda *_, **sight: sight)
    new, lengths_B = [x.to("meta") for x in step(100)], torch.tensor([37], device="meta")
    assert attend(*new, lengths_B, scale=0.25).shape == (1, 100, G * K, D)
    assert isinstance(attend(*new, lengths_B, scale=0.25, recent=64), dict)
