"""Copies in the host's memory lie in one place of each name, whatever their shapes."""

from __future__ import annotations

import torch

from sharesd.devices.transfer import PinnedBuffers


def test_shapes_of_a_name_share_one_place() -> None:
    copies = PinnedBuffers()
    plain = copies.copy("counted", torch.tensor([[1, 2], [3, 4]]), times=5)
    assert plain.tolist() == [[1, 2], [3, 4]]
    places = {plain.untyped_storage().data_ptr()}
    for num in (10, 3, 7, 10):
        found = copies.copy("counted", torch.arange(2 * num).view(2, num), times=9)
        assert found.tolist() == [[*range(num)], [*range(num, 2 * num)]]
        places.add(found.untyped_storage().data_ptr())
    assert len(places) == 1
    assert plain.untyped_storage().nbytes() == 2 * 8 * 4 * 5


def test_copies_of_the_round_before_stay() -> None:
    copies = PinnedBuffers()
    first = copies.copy("counted", torch.tensor([1, 2]))
    copies.turn()
    second = copies.copy("counted", torch.tensor([3, 4]))
    assert first.tolist() == [1, 2] and second.tolist() == [3, 4]
    copies.turn()
    assert copies.copy("counted", torch.tensor([5, 6])).data_ptr() == first.data_ptr() and second.tolist() == [3, 4]


def test_names_have_places_of_their_own_and_grow_where_they_must() -> None:
    copies = PinnedBuffers()
    ids, logprobs = copies.copy("ids", torch.tensor([1])), copies.copy("logprobs", torch.tensor([0.5]))
    longer = copies.copy("ids", torch.tensor([7, 8]))
    assert (ids.tolist(), logprobs.tolist(), longer.tolist()) == ([1], [0.5], [7, 8])
