"""Captures of CUDA graphs, recorded on a CPU, and replays of them; copies in the host's memory, in one place each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from compile.cuda_graphs import Graphs, Replayed, call_between_graphs
from sharesd.devices.transfer import PinnedBuffers
from tests.helpers.after_warmup import no_captures
from tests.helpers.recorded_graphs import RecordedGraphs

pytestmark = pytest.mark.usefixtures("one_thread")


def counter() -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    number, seen = torch.zeros(3, dtype=torch.int64), torch.zeros(3)

    def step() -> Tensor:
        number.add_(1)
        seen.copy_((number * 2).float())
        return seen + 1

    return number, seen, step


READS = [methodcaller(name) for name in ("tolist", "item", "cpu", "numpy", "nonzero")]


@pytest.mark.parametrize("read", [*READS, lambda x: [] if x > 7 else None, lambda x: torch.tensor([1, 2])])
def test_a_capture_that_needs_the_host_fails_once_and_calls_go_on(read: Callable, caplog: Any) -> None:
    number = torch.zeros(1)

    def step() -> None:
        number.add_(1)
        read(number)

    graphs = RecordedGraphs()
    first, second = Replayed(step, graphs), Replayed(step, graphs)
    for _ in range(5):
        first(), second()
    assert number.item() == 10 and not graphs.recorded
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "without CUDA graphs" in record.message and "capture" in record.message


def test_what_passes_between_graphs_other_than_by_results_is_poisoned() -> None:
    graphs, start = RecordedGraphs(), torch.ones(2)
    kept: list[Tensor] = []

    def make() -> Tensor:
        kept[:] = [start * 3]
        return kept[0] + 1

    first = Replayed(make, graphs)
    for _ in range(3):
        result = first()
    second = Replayed(lambda: kept[0] + result, graphs)
    sums = []
    for _ in range(4):
        first()
        sums.append(second().tolist()[0])
    assert first().tolist() == [4, 4], "what was returned stays"
    assert sums[:2] != sums[2:], "a stale read shows"


@pytest.mark.smoke
def test_no_captures_notices_one() -> None:
    graphs, (_, _, step) = RecordedGraphs(), counter()
    replayed = Replayed(step, graphs)
    with no_captures():
        replayed()
    with pytest.raises(RuntimeError, match="1 CUDA graphs were captured after warm-up"), no_captures():
        replayed()
    with no_captures():
        replayed()


def test_calls_between_graphs_are_made_by_every_replay() -> None:
    """With what the graph before has made, and what the next one reads."""
    graphs, (number, seen, step) = RecordedGraphs(), counter()
    there, calls = torch.zeros(3), []

    def in_pieces() -> Tensor:
        made = step() * 2

        def carry() -> None:
            calls.append(number.tolist()[0])  # the host may look at tensors here
            there.copy_(made)

        call_between_graphs(carry)
        seen.add_(there)
        return there + made

    replayed = Replayed(in_pieces, graphs)
    for call in range(1, 6):
        assert replayed().tolist() == [4 * (2 * call + 1)] * 3
        assert seen.tolist() == [2 * call + 2 * (2 * call + 1)] * 3
    assert calls == [1, 2, 2, 3, 4, 5]  # the second one is that of the capture, which is undone
    assert [recording.num_replays for recording in graphs.recorded] == [4, 4]
    assert graphs.recorded[0].operations.total() == 6  # add_, mul, _to_copy, copy_, add, mul


def test_what_fails_between_graphs_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    graphs, (number, _, step) = RecordedGraphs(), counter()

    def in_pieces() -> None:
        step()
        call_between_graphs(Mock(side_effect=RuntimeError("no way to there")))

    assert graphs.capture(in_pieces) is None and "no way to there" in caplog.text
    assert number.tolist() == [0] * 3
    call_between_graphs(step)  # nothing is being captured
    assert number.tolist() == [1] * 3


def patch_cuda(patch: pytest.MonkeyPatch, **functions: object) -> None:
    patch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    for name, function in functions.items():
        patch.setattr(torch.cuda, name, function)


def test_graphs_share_a_pool_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, taken, streams = [], [], iter(range(9))

    @contextmanager
    def captures(graph: object, pool: object, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads may take memory meanwhile"
        pools.append(pool)
        taken.append(stream)
        yield

    patch_cuda(monkeypatch, graph=captures, graph_pool_handle=object)
    patch_cuda(monkeypatch, Stream=lambda: next(streams), current_device=lambda: device)
    graphs, device = Graphs(), 0

    def go_to(number: int) -> None:
        nonlocal device
        device = number

    for _ in range(3):
        assert graphs.capture(lambda: 7) is not None
    Graphs().capture(lambda: 7)
    assert len(pools) == 4 and len(set(pools[:3])) == 1 and pools[3] is not pools[0]
    assert taken == [0, 0, 0, 1]

    def in_pieces() -> None:
        for number in (1, 0):
            call_between_graphs(partial(go_to, number))

    taken.clear()
    assert graphs.capture(in_pieces) is not None
    assert taken == [0, 2, 0] and len(pools) == 7 and len({*pools[:3], *pools[4:]}) == 1


def test_a_broken_capture_leaves_streams_and_other_functions_alone(monkeypatch: Any, caplog: Any) -> None:
    """As torch leaves them, whose capture raises on its way out: its stream current, its pool open."""
    current: list[str] = ["mine"]
    closed: list[tuple[int, object]] = []
    broken = True

    @contextmanager
    def captures(graph: object, stream: Any, **place: Any) -> Iterator[None]:
        current[0] = stream
        yield
        if broken:
            raise RuntimeError("operation failed due to a previous error during capture\nand more")
        current[0] = "mine"

    synchronised: list[str] = []
    patch_cuda(
        monkeypatch,
        graph=captures,
        graph_pool_handle=lambda: (0, 1),
        Stream=lambda: "its own",
        current_device=lambda: 0,
        is_initialized=lambda: True,
        current_stream=lambda: current[0],
        set_stream=lambda stream: current.__setitem__(0, stream),
        synchronize=lambda: synchronised.append(current[0]),
    )
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *place: closed.append(place), raising=False)
    graphs, calls = Graphs(), [0, 0, 0]

    def counted(number: int) -> None:
        calls[number] += 1

    functions = [Replayed(partial(counted, number), graphs) for number in range(3)]
    for function in functions[:2]:
        for _ in range(5):
            function()
        assert current == ["mine"]
    assert calls[:2] == [6, 6], "captured once, in vain, and called each time"
    assert len(graphs._failed) == len(closed) == len(synchronised) == 2 and closed[0] == (0, (0, 1))
    broken = False
    for _ in range(5):
        functions[2]()
    assert calls[2] == 2, "once, and once for the capture"
    [record] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.message.endswith("(operation failed due to a previous error during capture)")

    lost = Mock(side_effect=RuntimeError("an illegal memory access was encountered"))
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    broken = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graphs.capture(lambda: None)


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


def test_copies_of_the_round_before_stay_and_names_have_places_of_their_own() -> None:
    copies = PinnedBuffers()
    first = copies.copy("counted", torch.tensor([1, 2]))
    copies.turn()
    second = copies.copy("counted", torch.tensor([3, 4]))
    assert first.tolist() == [1, 2] and second.tolist() == [3, 4]
    copies.turn()
    assert copies.copy("counted", torch.tensor([5, 6])).data_ptr() == first.data_ptr() and second.tolist() == [3, 4]
    ids, logprobs = copies.copy("ids", torch.tensor([1])), copies.copy("logprobs", torch.tensor([0.5]))
    longer = copies.copy("ids", torch.tensor([7, 8]))  # grown
    assert (ids.tolist(), logprobs.tolist(), longer.tolist()) == ([1], [0.5], [7, 8])
