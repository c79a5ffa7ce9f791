"""Features move with the keys and values of an accepted path."""

from __future__ import annotations

import pytest
import torch

from compile.kv_compact import compact_slots, compact_slots_reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_of_a_path_move_to_the_front(dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(0)
    places = torch.randn(3, 20, 6, generator=dice).to(dtype)
    lengths = torch.tensor([4, 0, 15])
    path = torch.tensor([[0, 2, 3, 4, 4], [0, 1, 2, 3, 4], [0, 1, 3, 4, 4]])
    num = torch.tensor([3, 5, 0])
    ours, theirs = places.clone(), places.clone()
    compact_slots(ours, lengths, path, num)
    compact_slots_reference(theirs, lengths, path, num)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[0, 4:7], places[0, [4, 6, 7]]) and torch.equal(ours[2], places[2])
    apart = places.clone().transpose(1, 2).contiguous().transpose(1, 2)
    compact_slots(apart, lengths, path, num)
    assert torch.equal(apart, ours), "a view in another order"
