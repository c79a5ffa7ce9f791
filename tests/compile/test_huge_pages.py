"""Memory on huge pages: tensors that lie side by side, each of which is a storage of its own."""

from __future__ import annotations

import torch

from compile.huge_pages import ALIGNMENT, CHUNK, HUGE, HugePageArena, huge_pages, weights_on_huge_pages, zeros_like
from compile.linear import PackedLinear
from sharesd.kvcache.static import StaticKVCache


def test_zeros_keep_layouts_and_share_neither_bytes_nor_storage() -> None:
    like = [torch.ones(2, 3, 5).mT, torch.ones(7, dtype=torch.uint8), torch.ones(4, 4, dtype=torch.float64)]
    made = zeros_like(like)
    for ours, theirs in zip(made, like, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        assert not ours.any() and ours.data_ptr() % ALIGNMENT == 0
        storage = ours.untyped_storage()
        assert storage.data_ptr() == ours.data_ptr() and storage.nbytes() == ours.nbytes
    for number, ours in enumerate(made):
        ours.fill_(number)
    assert [ours.unique().tolist() for ours in made] == [[0], [1], [2]]
    assert made[0].data_ptr() % HUGE == 0 and made[-1].data_ptr() - made[0].data_ptr() < HUGE, "side by side"
    assert zeros_like([]) == []
    first, second = zeros_like([torch.ones(HUGE), torch.ones(HUGE)])
    second.fill_(3)
    del first
    assert second.sum() == 3 * HUGE, "memory outlives its neighbours"
    assert huge_pages(5).tolist() == [0] * 5


def test_keys_and_values_are_storages_of_their_own() -> None:
    cache = StaticKVCache(shapes=[(2, 16)] * 3, batch=2, slots=40, dtype=torch.bfloat16, device="cpu")
    tensors = (*cache.k, *cache.v)
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    assert all(t.storage_offset() == 0 for t in tensors)
    assert sum(t.untyped_storage().nbytes() for t in tensors) == cache.nbytes


def test_weights_keep_their_values() -> None:
    linears = [PackedLinear(torch.randn(20, 8), None) for _ in range(2)]
    before = [linear.weight.clone() for linear in linears]
    assert weights_on_huge_pages(torch.nn.Sequential(*linears)) == sum(weight.nbytes for weight in before)
    assert all(torch.equal(linear.weight, weight) for linear, weight in zip(linears, before, strict=True))


def test_an_arena_places_tensors_side_by_side() -> None:
    arena = HugePageArena()
    first, second = arena.zeros((3, 5), torch.float32), arena.zeros((7,), torch.uint8)
    assert first.shape == (3, 5) and first.count_nonzero() == 0 and second.tolist() == [0] * 7
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT
    large = arena.zeros((2 * CHUNK,), torch.uint8)  # in a chunk of its own
    assert large.data_ptr() % HUGE == 0 and len(large) == 2 * CHUNK
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
