"""Rules of captures and of several devices, kept or broken on purpose."""

from __future__ import annotations

from collections.abc import Callable

import torch

RULES: dict[str, Callable[[], object]] = {}
"""Calls that break a rule in a capture, which is on device 0."""
ALLOWED: dict[str, Callable[[], object]] = {}
"""Calls that break no rule."""


def rule(function: Callable[[], object]) -> Callable[[], object]:
    """Is to be told."""
    RULES[function.__name__.replace("_", " ")] = function
    return function


def allowed(function: Callable[[], object]) -> Callable[[], object]:
    """Is not."""
    ALLOWED[function.__name__.replace("_", " ")] = function
    return function


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
    """Make what the functions take, before the first capture."""
    global x, pinned, event, other, far
    if "x" in globals():
        return
    x, far = torch.arange(4, device="cuda:0"), torch.arange(4, device="cuda:1")
    pinned = torch.empty(4, dtype=torch.int64, pin_memory=True)
    event, other = torch.cuda.Event(), torch.cuda.Stream()
    event.record()
    x + 1, far + 1


def fork() -> torch.cuda.Stream:
    """Work on another stream, which has not been joined; returns the stream of the capture."""
    here = torch.cuda.current_stream()
    other.wait_stream(here)
    with torch.cuda.stream(other):
        x.add(1)
    return here


@allowed
def kernels() -> None:
    x + 1


@allowed
def a_copy_to_pinned_memory() -> None:
    pinned.copy_(x, non_blocking=True)


@allowed
def a_fork_that_is_joined() -> None:
    fork().wait_stream(other)


@rule
def a_fork_that_is_not_joined() -> None:
    fork()


@rule
def a_read() -> None:
    x.tolist()


@rule
def a_copy_from_pageable_memory() -> None:
    x.copy_(torch.arange(4))


@rule
def a_wait_for_the_device() -> None:
    torch.cuda.synchronize()


@rule
def a_wait_for_an_event_of_outside() -> None:
    event.synchronize()


@rule
def a_wait_for_an_event_of_the_capture() -> None:
    mark = torch.cuda.Event()
    mark.record()
    mark.synchronize()


@rule
def a_stream_that_waits_for_an_event_of_outside() -> None:
    torch.cuda.current_stream().wait_event(event)


@rule
def a_query_of_an_event() -> None:
    event.query()


@rule
def a_launch_past_the_capture() -> None:
    with torch.cuda.stream(torch.cuda.default_stream()):
        x.add_(1)


@rule
def pinning_memory() -> None:
    torch.cuda.cudart().cudaHostRegister(torch.empty(4096).data_ptr(), 4096, 0)


@rule
def a_copy_between_devices() -> None:
    x.copy_(far, non_blocking=True)


@rule
def a_launch_on_another_device() -> None:
    far.add_(1)


def replay_with_freed_memory() -> None:
    """Replay a graph that copies to memory which has been freed."""
    graph, stays = torch.cuda.CUDAGraph(), torch.empty(1 << 22, dtype=torch.uint8, device="cuda")
    with torch.cuda.graph(graph):
        stays.copy_(torch.empty_like(stays))
    del stays
    torch.cuda.empty_cache()
    graph.replay()


def nothing_at_all() -> int:
    """Return the number of GPUs."""
    return torch.cuda.device_count()


def end() -> None:
    """End the process at once."""
    import os

    os._exit(3)
