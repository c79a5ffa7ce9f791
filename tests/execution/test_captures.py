"""Captures of CUDA graphs, recorded on a CPU, and replays of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compile.cuda_graphs import Graphs, Replayed, call_between_graphs, no_captures
from sharesd.sampling_params import SamplingParams
from tests.helpers.oracle import new_engine, tiny_decoder
from tests.helpers.recorded_graphs import RecordedGraphs

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(max_new_tokens=8)


def counter() -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    number, seen = torch.zeros(3, dtype=torch.int64), torch.zeros(3)

    def step() -> Tensor:
        number.add_(1)
        seen.copy_((number * 2).float())
        return seen + 1

    return number, seen, step


def test_a_capture_runs_nothing_and_replays_do() -> None:
    graphs, (number, seen, step) = RecordedGraphs(), counter()
    replayed = Replayed(step, graphs)
    for call in range(1, 6):
        assert replayed().tolist() == [2 * call + 1] * 3
        assert number.tolist() == [call] * 3 and seen.tolist() == [2 * call] * 3
    [recording] = graphs.recorded
    assert recording.num_replays == 4 and recording.operations.total() == 5  # add_, mul, _to_copy, copy_, add


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.item(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: [] if x > 7 else None,
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1, 2]),
    ],
)
def test_a_capture_that_needs_the_host_fails_once_and_calls_go_on(
    read: Callable, caplog: pytest.LogCaptureFixture
) -> None:
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

    def use() -> Tensor:
        return kept[0] + made()  # type: ignore[operator]

    first = Replayed(make, graphs)
    for _ in range(3):
        result = first()
    made: Callable[[], Tensor] = lambda: result  # noqa: E731
    second = Replayed(use, graphs)
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
    """With what the graph before has made, and what the one behind it goes on with."""
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


def test_what_fails_between_graphs_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    graphs, (number, _, step) = RecordedGraphs(), counter()

    def fails() -> None:
        raise RuntimeError("no way to there")

    def in_pieces() -> None:
        step()
        call_between_graphs(fails)

    assert graphs.capture(in_pieces) is None and "no way to there" in caplog.text
    assert number.tolist() == [0] * 3
    call_between_graphs(step)  # nothing is being captured
    assert number.tolist() == [1] * 3


def test_graphs_share_a_pool_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, taken, streams = [], [], iter(range(9))

    @contextmanager
    def captures(graph: object, pool: object, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads may take memory meanwhile"
        pools.append(pool)
        taken.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", captures)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: next(streams))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
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


def test_a_broken_capture_leaves_streams_and_other_functions_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
    patches = {
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": captures,
        "graph_pool_handle": lambda: (0, 1),
        "Stream": lambda: "its own",
        "current_device": lambda: 0,
        "is_initialized": lambda: True,
        "current_stream": lambda: current[0],
        "set_stream": lambda stream: current.__setitem__(0, stream),
        "synchronize": lambda: synchronised.append(current[0]),
    }
    for name, patch in patches.items():
        monkeypatch.setattr(torch.cuda, name, patch)
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

    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    broken = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graphs.capture(lambda: None)


def test_without_cuda_capturing_is_reported_and_rounds_go_on(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA graphs can be captured here")
    engine = new_engine(tiny_decoder(3), graphs=Graphs())
    assert (
        engine.generate([[1, 2]], GREEDY)[0].token_ids
        == new_engine(tiny_decoder(3)).generate([[1, 2]], GREEDY)[0].token_ids
    )
    assert ["without CUDA graphs" in record.message for record in caplog.records] == [True]
