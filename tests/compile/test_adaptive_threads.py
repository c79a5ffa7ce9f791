"""The number of threads follows what the machine is doing besides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from compile.adaptive_threads import LATE_UP, RECENT, Crew


@pytest.fixture
def crew() -> Iterator[Crew]:
    before = torch.get_num_threads()
    crew = Crew()
    crew.reset(4)
    yield crew
    torch.set_num_threads(before)


def live(crew: Crew, rounds: int, neighbours: int, cores: int = 4) -> tuple[float, list[int]]:
    """Rounds beside busy neighbours: time they took, and the numbers of threads."""
    took, sizes = 0.0, []
    for _ in range(rounds):
        assert torch.get_num_threads() == crew.size
        sizes.append(crew.size)
        crowded = crew.size + neighbours > cores
        seconds = (2.5 if crowded else 1.0) * (0.5 + 2.0 / crew.size)
        crew._lost_ns.value += int(0.5e9 * seconds) if crowded else 0
        crew.worked(seconds)
        took += seconds
    return took, sizes


def test_a_quiet_machine_keeps_all_threads(crew: Crew) -> None:
    assert set(live(crew, 2000, 0)[1]) == {4}


@pytest.mark.parametrize("neighbours", [1, 2])
def test_threads_make_room_for_neighbours_and_come_back(crew: Crew, neighbours: int) -> None:
    took, sizes = live(crew, 2000, neighbours)
    assert sizes[8 * RECENT :].count(4 - neighbours) > 0.95 * (2000 - 8 * RECENT)
    assert took < 1.05 * 2000 * (0.5 + 2.0 / (4 - neighbours))
    sizes = live(crew, 4 * LATE_UP, 0)[1]
    assert sizes[-1] == 4


def test_waiting_that_fewer_threads_do_not_mend_is_lived_with(crew: Crew) -> None:
    sizes = []
    for _ in range(2000):
        crew._lost_ns.value += int(0.5e9)
        sizes.append(crew.size)
        crew.worked(1.0 + 0.4 * (4 - crew.size))
    assert sizes.count(4) > 0.97 * 2000


def test_a_neighbour_is_noticed_though_lesser_troubles_were_lived_with(crew: Crew) -> None:
    for _ in range(2000):
        crew._lost_ns.value += int(0.2e9)
        crew.worked(1.0 + 0.4 * (4 - crew.size))
    assert live(crew, 4 * RECENT, 1)[1][-1] == 3


def test_a_fixed_number_stays_and_one_set_by_others_is_taken(crew: Crew) -> None:
    crew.fix(3)
    assert set(live(crew, 200, 2)[1]) == {3}
    crew.fix(None)
    assert not crew.fixed and crew.size == crew.available, "a number fixed once binds nobody later"
    crew.reset(4)
    crew.fix(None)
    assert crew.size == 4
    torch.set_num_threads(2)
    crew.worked(1.0)
    assert crew.size == crew.most == 2


def test_one_thread_has_nobody_to_wait_for(crew: Crew) -> None:
    crew.reset(1)
    assert set(live(crew, 100, 4)[1]) == {1}
