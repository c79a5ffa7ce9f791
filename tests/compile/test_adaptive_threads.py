"""The number of threads follows what the machine is doing besides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from compile.adaptive_threads import MAX_BACKOFF_UP, NUM_AVERAGED, StepThreads


@pytest.fixture
def step_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepThreads]:
    before = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)), raising=False)
    step_threads = StepThreads()
    step_threads.reset(4)
    yield step_threads
    torch.set_num_threads(before)


def live(step_threads: StepThreads, rounds: int, neighbours: int, cores: int = 4) -> tuple[float, list[int]]:
    """Rounds with busy neighbours: time they took, and the numbers of threads."""
    took, sizes = 0.0, []
    for _ in range(rounds):
        assert torch.get_num_threads() == step_threads.size
        sizes.append(step_threads.size)
        crowded = step_threads.size + neighbours > cores
        seconds = (2.5 if crowded else 1.0) * (0.5 + 2.0 / step_threads.size)
        step_threads._lost_ns.value += int(0.5e9 * seconds) if crowded else 0
        step_threads.record_round(seconds)
        took += seconds
    return took, sizes


def test_a_quiet_machine_keeps_all_threads_and_one_thread_has_nobody_to_wait_for(step_threads: StepThreads) -> None:
    assert set(live(step_threads, 2000, 0)[1]) == {4}
    step_threads.reset(1)
    assert set(live(step_threads, 100, 4)[1]) == {1}


@pytest.mark.parametrize("neighbours", [1, 2])
def test_threads_make_room_for_neighbours_and_come_back(step_threads: StepThreads, neighbours: int) -> None:
    took, sizes = live(step_threads, 2000, neighbours)
    assert sizes[8 * NUM_AVERAGED :].count(4 - neighbours) > 0.95 * (2000 - 8 * NUM_AVERAGED)
    assert took < 1.05 * 2000 * (0.5 + 2.0 / (4 - neighbours))
    assert live(step_threads, 4 * MAX_BACKOFF_UP, 0)[1][-1] == 4


def test_waiting_that_fewer_threads_do_not_mend_is_lived_with(step_threads: StepThreads) -> None:
    sizes = []
    for _ in range(2000):
        step_threads._lost_ns.value += int(0.5e9)
        sizes.append(step_threads.size)
        step_threads.record_round(1.0 + 0.4 * (4 - step_threads.size))
    assert sizes.count(4) > 0.97 * 2000


def test_a_neighbour_is_noticed_though_lesser_troubles_were_lived_with(step_threads: StepThreads) -> None:
    for _ in range(2000):
        step_threads._lost_ns.value += int(0.2e9)
        step_threads.record_round(1.0 + 0.4 * (4 - step_threads.size))
    assert live(step_threads, 4 * NUM_AVERAGED, 1)[1][-1] == 3


def test_a_fixed_number_stays_and_one_set_by_others_is_taken(step_threads: StepThreads) -> None:
    step_threads.fix(3)
    assert set(live(step_threads, 200, 2)[1]) == {3}
    step_threads.fix(None)
    assert not step_threads.fixed and step_threads.size == step_threads.available, "it binds nobody later"
    step_threads.reset(4)
    step_threads.fix(None)
    assert step_threads.size == 4
    torch.set_num_threads(2)
    step_threads.record_round(1.0)
    assert step_threads.size == step_threads.max_size == 2


def test_threads_beyond_the_cores_are_not_used(
    step_threads: StepThreads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1}, raising=False)
    step_threads.fix(500)
    assert (step_threads.size, torch.get_num_threads()) == (2, 2)
    assert caplog.messages == ["--threads asks for 500 threads, and this process may use 2 cores: 2 threads are used"]
    caplog.clear()
    step_threads.fix(1)
    assert step_threads.size == 1 and not caplog.messages
    monkeypatch.setenv("OMP_NUM_THREADS", "64,2")  # torch lowers it, without a word
    assert StepThreads().available <= 2 and "OMP_NUM_THREADS asks for 64 threads" in caplog.text
