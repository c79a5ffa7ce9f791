"""Phases of a start add up to all of its time."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace

import pytest

from compile import start_times
from compile.start_times import FIRST, OTHER, StartTimes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(start_times.time, "monotonic", lambda: clock.now)
    return clock


def test_phases_add_up_and_inner_ones_interrupt_outer_ones(clock: SimpleNamespace) -> None:
    start = StartTimes(age=2.0)
    clock.now += 1
    with start.phase("weights"):
        clock.now += 4
        with start.phase("kernels"):
            clock.now += 8
        clock.now += 16
    clock.now += 32
    with start.phase("kernels"):
        clock.now += 64
    clock.now += 128
    start.end("first token")
    clock.now += 256
    with start.phase("weights"):
        clock.now += 512
    start.end()
    assert start.seconds == {FIRST: 3, "weights": 20, "kernels": 72, OTHER: 32, "first token": 128}
    assert start.total == clock.now - 98 - 256 - 512


def test_a_phase_that_fails_ends(clock: SimpleNamespace) -> None:
    start = StartTimes()
    with pytest.raises(ValueError, match="no"), start.phase("weights"):
        clock.now += 1
        raise ValueError("no")
    clock.now += 2
    start.end()
    assert start.seconds == {FIRST: 0, "weights": 1, OTHER: 2}


def test_phases_of_another_thread_take_no_time_of_the_start(clock: SimpleNamespace) -> None:
    start = StartTimes()
    start.follow()

    def build() -> None:
        with start.phase("kernels"):
            clock.now += 1

    thread = Thread(target=build)
    thread.start()
    thread.join()
    with start.phase("weights"):
        clock.now += 2
    start.end()
    assert start.seconds == {FIRST: 1, "weights": 2, OTHER: 0}
