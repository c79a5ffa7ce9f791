"""A second model reads what it missed in chunks of one size, which are captured; the outcome is as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile.attention import MAX_STEP
from compile.cuda_graphs import no_captures
from sharesd.drafters.classic.drafter import ClassicDrafter
from sharesd.speculation.draft_tree import chains
from tests.helpers.oracle import tiny_decoder
from tests.helpers.recorded_graphs import RecordedGraphs, take_the_way_of_cuda

SLOTS = 4 * MAX_STEP


def drafter(graphs: Any) -> ClassicDrafter:
    """A drafter of two rows, whose second has read a short prompt."""
    found = ClassicDrafter(tiny_decoder(1), batch=2, slots=SLOTS, shapes=chains(4), weight_bytes=0, graphs=graphs)
    found.begin(1, [3, 4, 5], False)
    found.read(1, [3, 4, 5])
    return found


@pytest.mark.parametrize("missed", [1, 5, MAX_STEP, 2 * MAX_STEP + 7, SLOTS - 4])
def test_missed_tokens_are_read_by_replays(missed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    take_the_way_of_cuda(monkeypatch)
    graphs = RecordedGraphs()
    eager, captured = drafter(None), drafter(graphs)
    for num in (1, 2):  # a plain call, and the capture
        captured.catch_up({1: [3, 4, 5, *[6] * (1 + num)]}, idle=True)
    captured.begin(1, [3, 4, 5], False)
    captured.read(1, [3, 4, 5])
    text = [3, 4, 5, *(7 + i % 20 for i in range(missed)), 1]
    eager.catch_up({1: text}, idle=True)
    before = graphs.num_replays
    with no_captures():
        captured.catch_up({1: text}, idle=True)
    assert graphs.num_replays - before == -(-missed // MAX_STEP) and len(graphs.recorded) == 1
    assert captured.cache.cached_ids[1] == eager.cache.cached_ids[1] == text[:-1]
    assert captured.cache.lengths.tolist() == eager.cache.lengths.tolist() == [1, len(text) - 1]
    assert captured._before_B.tolist() == eager._before_B.tolist() == [0, text[-2]]
    for ours, theirs in zip((*captured.cache.k, *captured.cache.v), (*eager.cache.k, *eager.cache.v), strict=True):
        ours, theirs = (part[1, :, : len(text) - 1] for part in (ours, theirs))
        torch.testing.assert_close(ours, theirs)
