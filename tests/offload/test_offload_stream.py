"""Blocks come through links into slots: none is used before it has arrived, none is overwritten while it is used."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch

from offload.disk_reader import DiskLink, faster_direct, read_rate
from offload.pinned_transfer import CudaLink, PinnedMemory, _EventCopy
from offload.prefetcher import Prefetcher
from offload.transfer import LinkError, Throttled, host_slots
from tests.helpers.timed_device import TimedDevice, TimedSlot, Use, wrong_uses

RECORD = 3 * 4096


def go_through(stream: Prefetcher, blocks: Iterable[int]) -> None:
    for block in blocks:
        stream.need(block)
        stream.done(block)


def random_passes(dice: random.Random) -> tuple[list[int], int, list[list[int]]]:
    """Blocks that travel, slots, and the blocks of some passes; a few passes end early, or begin anew."""
    num_blocks = dice.randint(1, 7)
    blocks = sorted(dice.sample(range(12), num_blocks))
    passes = [blocks[: num_blocks if dice.random() < 0.7 else dice.randint(1, num_blocks)] for _ in range(6)]
    return blocks, dice.randint(1, 5), passes


def stream_of(device: TimedDevice, blocks: Iterable[int], num_slots: int) -> Prefetcher:
    slots: Any = [TimedSlot(number, device) for number in range(num_slots)]
    records: Any = {block: SimpleNamespace(tensor=block) for block in blocks}
    return Prefetcher([*blocks], slots, CudaLink(records, cuda=device))


def run_on_device(seed: int) -> list[str]:
    """Passes over a device whose copies and blocks take random times. Returns what went wrong."""
    dice = random.Random(seed)
    blocks, num_slots, passes = random_passes(dice)
    device = TimedDevice(lambda: dice.choice([0.1, 1.0, 10.0]) * dice.random())
    stream = stream_of(device, blocks, num_slots)
    for each in passes:
        for block in each:
            device.run(stream.need(block), block)
            stream.done(block)
    return wrong_uses(device.writes, device.reads)


def test_events_keep_copies_and_computation_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is missing, towards computation or towards the copies, shows."""
    assert [problem for seed in range(300) for problem in run_on_device(seed)] == []
    for link, method, shown in ((CudaLink, "mark", "overwritten"), (_EventCopy, "wait", "before it lay")):
        with monkeypatch.context() as patch:
            patch.setattr(link, method, lambda self: None)
            assert any(shown in problem for seed in range(20) for problem in run_on_device(seed))


class ClockLink:
    """A link of a host that waits, over a clock that is made up."""

    def __init__(self, took: Callable[[], float] = lambda: 1.0) -> None:
        self.now, self.free, self.busy_s, self._took = 0.0, 0.0, 0.0, took
        self.writes: list[Use] = []

    def stream(self, blocks: Iterable[int], num_slots: int) -> Prefetcher:
        slots: Any = [SimpleNamespace(number=number, nbytes=1) for number in range(num_slots)]
        return Prefetcher([*blocks], slots, self)

    def mark(self) -> None:
        pass

    def start(self, block: int, slot: Any, after: None) -> ClockCopy:
        start = max(self.now, self.free)
        self.free = start + self._took()
        self.busy_s += self.free - start
        self.writes.append(Use(slot.number, block, start, self.free))
        return ClockCopy(self, self.free)

    def close(self) -> None:
        pass


class ClockCopy(NamedTuple):
    link: ClockLink
    end: float

    def wait(self) -> None:
        self.link.now = max(self.link.now, self.end)

    @property
    def arrived(self) -> float | None:
        return self.end if self.link.now >= self.end else None


def run_on_host(seed: int, *, early: bool = False) -> list[str]:
    """As `run_on_device`, on a host that waits. `early`: slots are given back before the block has run."""
    dice = random.Random(seed)
    blocks, num_slots, passes = random_passes(dice)
    link = ClockLink(dice.random)
    stream, reads = link.stream(blocks, num_slots), []
    for each in passes:
        for block in each:
            slot, start = stream.need(block), link.now
            if early:
                stream.done(block)
            link.now += dice.random()
            reads.append(Use(slot, block, start, link.now))
            if not early:
                stream.done(block)
    return wrong_uses(link.writes, reads)


def test_no_block_is_used_early_or_overwritten_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is given back early shows, and a copy that nobody waits for."""
    assert [problem for seed in range(300) for problem in run_on_host(seed)] == []
    assert any("overwritten" in problem for seed in range(20) for problem in run_on_host(seed, early=True))
    monkeypatch.setattr(ClockCopy, "wait", lambda self: None)
    assert any("before it lay" in problem for seed in range(20) for problem in run_on_host(seed))


@pytest.mark.parametrize(("copy_s", "compute_s"), [(1.0, 0.2), (1.0, 1.0), (0.2, 1.0)])
def test_a_pass_takes_as_long_as_the_slower_of_link_and_computation(copy_s: float, compute_s: float) -> None:
    link, most = ClockLink(lambda: copy_s), 5 * 10 * max(copy_s, compute_s) + copy_s + compute_s
    device = TimedDevice(lambda: compute_s if device.current_stream() is device.compute else copy_s)
    on_host, on_device = link.stream(range(10), 2), stream_of(device, range(10), 2)
    for block in [*range(10)] * 5:
        on_host.need(block)
        link.now += compute_s
        on_host.done(block)
        device.run(on_device.need(block), block)
        on_device.done(block)
    assert link.now <= most and device.compute.time <= most
    assert on_device.traffic.waited_s < 1, "the host waits for nothing"


def test_the_next_pass_arrives_while_others_compute() -> None:
    link = ClockLink()
    stream = link.stream(range(6), 3)
    for _ in range(2):
        go_through(stream, range(6))
        link.now += 10.0  # a draft
    before = link.now
    go_through(stream, range(3))
    assert link.now == before


def test_what_a_slot_holds_is_not_moved_again() -> None:
    """And a stream needs blocks and slots."""
    for blocks, num_slots in (([], 1), ([1], 0), ([1, 1], 1)):
        with pytest.raises(ValueError, match="give different blocks and a slot"):
            ClockLink().stream(blocks, num_slots)
    link = ClockLink()
    stream = link.stream([4, 7], 5)
    go_through(stream, [4, 7] * 3)
    go_through(stream, [4] * 3)  # passes of the first block alone
    assert len(link.writes) == 2
    with pytest.raises(ValueError, match="block 3 is not in this stream"):
        stream.need(3)


def test_memory_is_pinned_at_its_exact_size_and_given_back() -> None:
    device = TimedDevice(lambda: 0.0)
    memory = PinnedMemory(5 * 4096, cuda=device)
    assert device.pinned == {memory.tensor.data_ptr(): 5 * 4096}
    memory.close()
    memory.close()
    assert device.pinned == {}
    memory = PinnedMemory(4096, cuda=device)
    assert list(device.pinned.values()) == [4096]
    del memory  # whoever forgets it does not leave it locked
    assert device.pinned == {}

    link = CudaLink({block: PinnedMemory(4096, cuda=device) for block in range(3)}, cuda=device)
    assert len(device.pinned) == 3
    link.close()
    link.close()
    assert device.pinned == {}
    with pytest.raises(ValueError, match=r"0\.0 GB of host memory cannot be pinned \(CUDA error 2\); raise"):
        PinnedMemory(4096, cuda=TimedDevice(lambda: 0.0, refuses=2))


@pytest.fixture
def record_file(tmp_path: Path) -> Path:
    path = tmp_path / "records"
    path.write_bytes(b"".join(bytes([number]) * RECORD for number in range(6)))
    return path


OFFSETS = {number: number * RECORD for number in range(6)}


def from_file(file: Path, blocks: Iterable[int], num_slots: int, **options: Any) -> Prefetcher:
    return Prefetcher([*blocks], host_slots(RECORD, num_slots), DiskLink(file, OFFSETS, direct=False), **options)


@pytest.mark.parametrize("direct", [False, True])
def test_records_of_a_file_arrive_whole(record_file: Path, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if direct:
        try:
            os.close(os.open(record_file, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            pytest.skip("this file system has no direct reads")
    monkeypatch.setattr("offload.disk_reader.PIECE", 4096)  # several pieces for each record
    before = threading.active_count()
    stream = Prefetcher([1, 2, 4, 5], host_slots(RECORD, 2), DiskLink(record_file, OFFSETS, direct=direct))
    for block in [1, 2, 4, 5] * 20:
        assert stream.slots[stream.need(block)].eq(block).all()
        stream.done(block)
    traffic = stream.traffic
    stream.close()
    stream.close()
    assert threading.active_count() == before
    assert traffic.num_bytes in (82 * RECORD, 81 * RECORD)
    assert 0 < traffic.busy_s <= traffic.elapsed_s and 0 < traffic.utilisation <= 1


def test_no_more_than_a_record_is_read_into_a_slot(record_file: Path) -> None:
    sizes = {block: (1 + block % 3) * 4096 for block in range(6)}
    stream = from_file(record_file, range(6), 1, sizes=sizes)
    stream.slots[0][sizes[0] :] = 255
    for block in range(6):
        slot = stream.slots[stream.need(block)]
        assert slot[: sizes[block]].eq(block).all() and slot[sizes[block] :].eq(255).all()
        slot.fill_(255)
        stream.done(block)
    stream.close()
    assert stream.traffic.num_bytes == sum(sizes.values()) + sizes[0]


def test_a_file_that_ends_early_is_one_clear_error(record_file: Path) -> None:
    os.truncate(record_file, 4 * RECORD + 100)
    stream, told = from_file(record_file, [1, 4, 5], 2), f"the file ends at byte {4 * RECORD + 100}$"
    for _ in range(2):  # it is no better at the second try
        go_through(stream, [1])
        with pytest.raises(LinkError, match=f"block 4 cannot be read from .*records: {told}"):
            stream.need(4)
    stream.close()
    with pytest.raises(LinkError, match="none cannot be opened for reading: No such file or directory"):
        DiskLink(record_file.with_name("none"), {}, direct=False)


def test_a_failing_disk_is_one_clear_error(record_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = from_file(record_file, [1, 2, 3], 1)
    stream.need(1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", Mock(side_effect=OSError(5, "Input/output error")))
        stream.done(1)
        with pytest.raises(LinkError, match="block 2 cannot be read from .*: Input/output error$"):
            stream.need(2)
    assert stream.slots[stream.need(1)].eq(1).all()  # the next pass tries again
    stream.close()


def test_closing_leaves_nothing_behind(record_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, closing = os.preadv, threading.Event()
    monkeypatch.setattr(os, "preadv", lambda *given: closing.wait() and read(*given))
    before = threading.active_count()
    link = DiskLink(record_file, OFFSETS, direct=False, threads=2)
    join = link._threads[0].join
    monkeypatch.setattr(link._threads[0], "join", lambda: closing.set() or join())
    slots = host_slots(RECORD, 6)
    copies = [link.start(number, slots[number], None) for number in range(6)]
    link.close()
    assert threading.active_count() == before
    with pytest.raises(LinkError, match="block 5 cannot be read from .*: the link was closed"):
        copies[5].wait()
    with pytest.raises(LinkError, match="the link was closed"):
        link.start(0, slots[0], None)


def test_the_faster_way_of_reading_is_taken(record_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_rate(record_file, direct=False) > 0
    for ordinary, expected in ((1.0, True), (3.0, False)):
        rates = {True: 2.0, False: ordinary}
        monkeypatch.setattr("offload.disk_reader.read_rate", lambda path, *, direct, rates=rates: rates[direct])
        assert faster_direct(record_file) is expected


def test_blocks_are_checked_when_they_are_first_used(record_file: Path) -> None:
    seen = []

    def check(block: int, slot: torch.Tensor) -> None:
        if not slot.eq(block).all():
            raise LinkError(f"block {block} is damaged")
        seen.append(block)

    with record_file.open("r+b") as file:
        file.seek(3 * RECORD + 5)
        file.write(b"x")
    stream = from_file(record_file, [1, 2, 3], 2, check=check)
    for _ in range(2):
        go_through(stream, [1, 2])
        with pytest.raises(LinkError, match="block 3 is damaged"):
            stream.need(3)
    stream.close()
    assert seen == [1, 2]


def test_a_throttled_link_is_as_fast_as_it_says(record_file: Path) -> None:
    now = [5.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    link = Throttled(DiskLink(record_file, OFFSETS, direct=False), 20 * RECORD, clock=lambda: now[0], sleep=sleep)
    stream = Prefetcher(range(6), host_slots(RECORD, 2), link)
    for block in range(6):
        assert stream.slots[stream.need(block)].eq(block).all()
        stream.done(block)
        assert now[0] == pytest.approx(5 + (block + 1) / 20)
    now[0] += 10.0  # two records have arrived meanwhile, and no more
    go_through(stream, range(3))
    stream.close()
    assert now[0] == pytest.approx(5 + 6 / 20 + 10 + 1 / 20)
    assert stream.traffic.busy_s == pytest.approx(11 / 20)
    link, started = Throttled(DiskLink(record_file, OFFSETS, direct=False), 50 * RECORD), time.perf_counter()
    stream = Prefetcher(range(6), host_slots(RECORD, 2), link)
    go_through(stream, range(6))
    assert time.perf_counter() - started >= 6 / 50 - 0.001, "on a real clock"
    stream.close()


@pytest.mark.parametrize(("piece_s", "most"), [(0.3, 20), (5.0, 1)])
def test_waits_are_used_for_other_work_that_makes_nobody_wait(monkeypatch: Any, piece_s: float, most: int) -> None:
    link, pieces = ClockLink(), list[float]()
    monkeypatch.setattr("offload.prefetcher.time", SimpleNamespace(perf_counter=lambda: link.now))
    stream = link.stream(range(10), 2)

    def work() -> bool:
        link.now += piece_s
        pieces.append(link.now)
        return True

    def run() -> float:
        started = link.now
        for block in range(10):
            stream.need(block)
            link.now += 0.2
            stream.done(block)
        return link.now - started

    run()
    alone = run()
    assert not pieces
    with stream.overlap(work):
        together = run()
    assert 1 <= len(pieces) <= most
    assert together <= alone + max(0.0, piece_s - 1.0) + 1e-9
    if most > 1:
        assert len(pieces) == most
    pieces.clear()
    run()
    assert not pieces


def test_other_work_ends_when_there_is_no_more_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    link, calls = ClockLink(), []
    monkeypatch.setattr("offload.prefetcher.time", SimpleNamespace(perf_counter=lambda: link.now))
    stream = link.stream(range(4), 2)
    for _ in range(3):
        with stream.overlap(lambda: bool(calls.append(0))):
            go_through(stream, range(4))
    assert len(calls) == 2  # in the first pass nobody knows yet how long blocks are awaited
