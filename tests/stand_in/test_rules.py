"""The stand-in driver tells of broken rules, and of nothing else; what calls give comes back, whatever happens."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.stand_in.worker import Outcome, run


def fork() -> torch.cuda.Stream:
    """Work on another stream, which has not been joined; returns the stream of the capture."""
    here = torch.cuda.current_stream()
    other.wait_stream(here)
    with torch.cuda.stream(other):
        x.add(1)
    return here


def wait_for_own_event() -> None:
    mark = torch.cuda.Event()
    mark.record()
    mark.synchronize()


def launch_past_the_capture() -> None:
    with torch.cuda.stream(torch.cuda.default_stream()):
        x.add_(1)


RULES: dict[str, Callable[[], object]] = {
    "a fork that is not joined": fork,
    "a read": lambda: x.tolist(),
    "a copy from pageable memory": lambda: x.copy_(torch.arange(4)),
    "a wait for the device": torch.cuda.synchronize,
    "a wait for an event of outside": lambda: event.synchronize(),
    "a wait for an event of the capture": wait_for_own_event,
    "a stream that waits for an event of outside": lambda: torch.cuda.current_stream().wait_event(event),
    "a query of an event": lambda: event.query(),
    "a launch past the capture": launch_past_the_capture,
    "pinning memory": lambda: torch.cuda.cudart().cudaHostRegister(torch.empty(4096).data_ptr(), 4096, 0),
    "a copy between devices": lambda: x.copy_(far, non_blocking=True),
    "a launch on another device": lambda: far.add_(1),
}
"""Calls that break a rule in a capture, which is on device 0."""
ALLOWED: dict[str, Callable[[], object]] = {
    "kernels": lambda: x + 1,
    "a copy to pinned memory": lambda: pinned.copy_(x, non_blocking=True),
    "a fork that is joined": lambda: fork().wait_stream(other),
}


def captured(name: str) -> bool:
    """Do what has this name in a capture; False where torch has refused it."""
    prepare()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(0)):
            {**RULES, **ALLOWED}[name]()
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_device(0)
    return True


def prepare() -> None:
    """Make what the calls take, before the first capture."""
    global x, pinned, event, other, far
    if "x" in globals():
        return
    x, far = torch.arange(4, device="cuda:0"), torch.arange(4, device="cuda:1")
    pinned = torch.empty(4, dtype=torch.int64, pin_memory=True)
    event, other = torch.cuda.Event(), torch.cuda.Stream()
    event.record()
    x + 1, far + 1


@pytest.fixture(scope="module", params=["0", "1"], ids=["told", "refused"])
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """By name, of all rules; FAKE_STRICT says what a broken one gives."""
    names = [*ALLOWED, *RULES]
    found = run([partial(captured, name) for name in names], FAKE_DEVICES="2", FAKE_PEER="0", FAKE_STRICT=request.param)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("name", ALLOWED)
def test_nothing_is_told_where_no_rule_is_broken(name: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[name].value and not outcomes[name].trouble


@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_is_told_or_refused(name: str, outcomes: dict[str, Outcome]) -> None:
    assert not outcomes[name].error
    assert outcomes[name].violations or not outcomes[name].value


def replay_with_freed_memory() -> None:
    """Replay a graph that copies to memory which has been freed."""
    graph, stays = torch.cuda.CUDAGraph(), torch.empty(1 << 22, dtype=torch.uint8, device="cuda")
    with torch.cuda.graph(graph):
        stays.copy_(torch.empty_like(stays))
    del stays
    torch.cuda.empty_cache()
    graph.replay()


def test_calls_bring_back_what_they_give() -> None:
    count, end = torch.cuda.device_count, partial(os._exit, 3)
    lost, counted, failed, ended, behind = run(
        [replay_with_freed_memory, count, partial(captured, "no such rule"), end, count], FAKE_DEVICES="3"
    )
    assert list(lost.violations) == ["a graph is replayed, and memory of its cudaMemcpyAsync has been freed"]
    assert counted.value == 3 and not counted.trouble
    assert "KeyError" in failed.error
    assert "status 3 in this call" in ended.error and "status 3 before this call" in behind.error
