"""Blocks come through links into slots: none is used before it has arrived, none is overwritten while it is used."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.disk_reader import DiskLink, faster_direct, read_rate
from offload.pinned_transfer import CudaLink, PinnedMemory, _EventCopy
from offload.prefetcher import Prefetcher
from offload.transfer import LinkError, Throttled, host_slots
from tests.helpers.timed_device import TimedDevice, TimedSlot, Use, wrong_uses

RECORD = 3 * 4096


# ---- order, with clocks that are made up


def random_passes(dice: random.Random) -> tuple[list[int], int, list[list[int]]]:
    """Blocks that travel, slots, and the blocks of some passes; a few passes end early, or begin anew."""
    num_blocks = dice.randint(1, 7)
    blocks = sorted(dice.sample(range(12), num_blocks))
    passes = [blocks[: num_blocks if dice.random() < 0.7 else dice.randint(1, num_blocks)] for _ in range(6)]
    return blocks, dice.randint(1, 5), passes


def run_on_device(seed: int) -> list[str]:
    """Passes over a device whose copies and blocks take random times. Returns what went wrong."""
    dice = random.Random(seed)
    blocks, num_slots, passes = random_passes(dice)
    device = TimedDevice(lambda: dice.choice([0.1, 1.0, 10.0]) * dice.random())
    slots = [TimedSlot(number, device) for number in range(num_slots)]
    records: Any = {block: SimpleNamespace(tensor=block) for block in blocks}
    stream = Prefetcher(blocks, slots, CudaLink(records, cuda=device))  # type: ignore[misc]
    for each in passes:
        for block in each:
            device.run(stream.need(block), block)
            stream.done(block)
    return wrong_uses(device.writes, device.reads)


def test_events_keep_copies_and_computation_apart() -> None:
    assert [problem for seed in range(300) for problem in run_on_device(seed)] == []


def test_a_missing_event_towards_the_copies_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaLink, "mark", lambda self: None)
    assert any("overwritten" in problem for seed in range(20) for problem in run_on_device(seed))


def test_a_missing_event_towards_computation_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_EventCopy, "wait", lambda self: None)
    assert any("before it lay" in problem for seed in range(20) for problem in run_on_device(seed))


class ClockLink:
    """A link of a host that waits, over a clock that is made up."""

    def __init__(self, took) -> None:
        self.now, self.free, self.busy_s, self._took = 0.0, 0.0, 0.0, took
        self.writes: list[Use] = []

    def mark(self) -> None:
        pass

    def start(self, block: int, slot, after: None):
        start = max(self.now, self.free)
        self.free = start + self._took()
        self.busy_s += self.free - start
        self.writes.append(Use(slot.number, block, start, self.free))
        return ClockCopy(self, self.free)

    def close(self) -> None:
        pass


class ClockCopy:
    def __init__(self, link: ClockLink, end: float) -> None:
        self._link, self._end = link, end

    def wait(self) -> None:
        self._link.now = max(self._link.now, self._end)

    @property
    def arrived(self) -> float | None:
        return self._end if self._link.now >= self._end else None


class ClockSlot:
    nbytes = 1

    def __init__(self, number: int) -> None:
        self.number = number


def run_on_host(seed: int, *, early: bool = False) -> list[str]:
    """As `run_on_device`, on a host that waits. `early`: slots are given back before the block has run."""
    dice = random.Random(seed)
    blocks, num_slots, passes = random_passes(dice)
    link = ClockLink(lambda: dice.random())
    stream = Prefetcher(blocks, [ClockSlot(number) for number in range(num_slots)], link)  # type: ignore[misc]
    reads = []
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


def test_no_block_is_used_early_or_overwritten_in_use() -> None:
    assert [problem for seed in range(300) for problem in run_on_host(seed)] == []


def test_a_slot_given_back_early_shows() -> None:
    assert any("overwritten" in problem for seed in range(20) for problem in run_on_host(seed, early=True))


def test_a_copy_nobody_waits_for_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClockCopy, "wait", lambda self: None)
    assert any("before it lay" in problem for seed in range(20) for problem in run_on_host(seed))


@pytest.mark.parametrize(("copy_s", "compute_s"), [(1.0, 0.2), (1.0, 1.0), (0.2, 1.0)])
def test_a_pass_takes_as_long_as_the_slower_of_link_and_computation(copy_s: float, compute_s: float) -> None:
    link = ClockLink(lambda: copy_s)
    stream = Prefetcher(range(10), [ClockSlot(number) for number in range(2)], link)  # type: ignore[misc]
    for _ in range(5):
        for block in range(10):
            stream.need(block)
            link.now += compute_s
            stream.done(block)
    assert link.now <= 5 * 10 * max(copy_s, compute_s) + copy_s + compute_s


@pytest.mark.parametrize(("copy_s", "compute_s"), [(1.0, 0.2), (1.0, 1.0), (0.2, 1.0)])
def test_so_it_does_on_a_device(copy_s: float, compute_s: float) -> None:
    device = TimedDevice(lambda: compute_s if device.current_stream() is device.compute else copy_s)
    slots = [TimedSlot(number, device) for number in range(2)]
    records: Any = {block: SimpleNamespace(tensor=block) for block in range(10)}
    stream = Prefetcher(range(10), slots, CudaLink(records, cuda=device))  # type: ignore[misc]
    for _ in range(5):
        for block in range(10):
            device.run(stream.need(block), block)
            stream.done(block)
    assert device.compute.time <= 5 * 10 * max(copy_s, compute_s) + copy_s + compute_s
    assert stream.traffic.waited_s < 1, "the host waits for nothing"


def test_the_next_pass_arrives_while_others_compute() -> None:
    link = ClockLink(lambda: 1.0)
    stream = Prefetcher(range(6), [ClockSlot(number) for number in range(3)], link)  # type: ignore[misc]
    for _ in range(2):
        for block in range(6):
            stream.need(block)
            stream.done(block)
        link.now += 10.0  # a draft
    before = link.now
    for block in range(3):
        stream.need(block)
        stream.done(block)
    assert link.now == before


def test_what_a_slot_holds_is_not_moved_again() -> None:
    link = ClockLink(lambda: 1.0)
    stream = Prefetcher([4, 7], [ClockSlot(number) for number in range(5)], link)  # type: ignore[misc]
    for _ in range(3):
        for block in (4, 7):
            stream.need(block)
            stream.done(block)
    for _ in range(3):  # passes of the first block alone
        stream.need(4)
        stream.done(4)
    assert len(link.writes) == 2


# ---- pinned memory


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


def test_a_link_that_is_closed_gives_pinned_memory_back() -> None:
    device = TimedDevice(lambda: 0.0)
    link = CudaLink({block: PinnedMemory(4096, cuda=device) for block in range(3)}, cuda=device)
    assert len(device.pinned) == 3
    link.close()
    link.close()
    assert device.pinned == {}


def test_memory_that_cannot_be_pinned_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match=r"0\.0 GB of host memory cannot be pinned \(CUDA error 2\); raise"):
        PinnedMemory(4096, cuda=TimedDevice(lambda: 0.0, refuses=2))


# ---- files


@pytest.fixture
def record_file(tmp_path: Path) -> Path:
    """Six records, each full of its number."""
    path = tmp_path / "records"
    path.write_bytes(b"".join(bytes([number]) * RECORD for number in range(6)))
    return path


OFFSETS = {number: number * RECORD for number in range(6)}


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
    for _ in range(20):
        for block in (1, 2, 4, 5):
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
    link = DiskLink(record_file, OFFSETS, direct=False)
    stream = Prefetcher(range(6), host_slots(RECORD, 1), link, sizes=sizes)
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
    stream = Prefetcher([1, 4, 5], host_slots(RECORD, 2), DiskLink(record_file, OFFSETS, direct=False))
    for _ in range(2):  # it is no better at the second try
        stream.need(1)
        stream.done(1)
        with pytest.raises(
            LinkError, match=rf"block 4 cannot be read from .*records: the file ends at byte {4 * RECORD + 100}$"
        ):
            stream.need(4)
    stream.close()


def test_a_failing_disk_is_one_clear_error(record_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_) -> int:
        raise OSError(5, "Input/output error")

    stream = Prefetcher([1, 2, 3], host_slots(RECORD, 1), DiskLink(record_file, OFFSETS, direct=False))
    stream.need(1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        stream.done(1)
        with pytest.raises(LinkError, match="block 2 cannot be read from .*: Input/output error$"):
            stream.need(2)
    assert stream.slots[stream.need(1)].eq(1).all()  # the next pass tries again
    stream.close()


def test_closing_leaves_nothing_behind(record_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv

    def slowly(*arguments) -> int:
        time.sleep(0.02)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", slowly)
    before = threading.active_count()
    link = DiskLink(record_file, OFFSETS, direct=False, threads=2)
    slots = host_slots(RECORD, 6)
    copies = [link.start(number, slots[number], None) for number in range(6)]
    link.close()
    assert threading.active_count() == before
    with pytest.raises(LinkError, match="block 5 cannot be read from .*: the link was closed"):
        copies[5].wait()
    with pytest.raises(LinkError, match="the link was closed"):
        link.start(0, slots[0], None)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="none cannot be opened for reading: No such file or directory"):
        DiskLink(tmp_path / "none", {}, direct=False)


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
    stream = Prefetcher([1, 2, 3], host_slots(RECORD, 2), DiskLink(record_file, OFFSETS, direct=False), check=check)
    for _ in range(2):
        for block in (1, 2):
            stream.need(block)
            stream.done(block)
        with pytest.raises(LinkError, match="block 3 is damaged"):
            stream.need(3)
    stream.close()
    assert seen == [1, 2]


# ---- a slower link


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
    for block in range(3):
        stream.need(block)
        stream.done(block)
    stream.close()
    assert now[0] == pytest.approx(5 + 6 / 20 + 10 + 1 / 20)
    assert stream.traffic.busy_s == pytest.approx(11 / 20)


def test_throttling_holds_on_a_real_clock(record_file: Path) -> None:
    link = Throttled(DiskLink(record_file, OFFSETS, direct=False), 50 * RECORD)
    started = time.perf_counter()
    stream = Prefetcher(range(6), host_slots(RECORD, 2), link)
    for block in range(6):
        stream.need(block)
        stream.done(block)
    took = time.perf_counter() - started
    stream.close()
    assert took >= 6 / 50 - 0.001


def test_a_stream_needs_blocks_and_slots() -> None:
    for blocks, slots in (([], [ClockSlot(0)]), ([1], []), ([1, 1], [ClockSlot(0)])):
        with pytest.raises(ValueError, match="give different blocks and a slot"):
            Prefetcher(blocks, slots, ClockLink(lambda: 1.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block 3 is not in this stream"):
        Prefetcher([1], [ClockSlot(0)], ClockLink(lambda: 1.0)).need(3)  # type: ignore[list-item]


@pytest.mark.parametrize(("piece_s", "most"), [(0.3, 20), (5.0, 1)])
def test_waits_are_used_for_other_work_that_makes_nobody_wait(
    monkeypatch: pytest.MonkeyPatch, piece_s: float, most: int
) -> None:
    link = ClockLink(lambda: 1.0)
    monkeypatch.setattr("offload.prefetcher.time", SimpleNamespace(perf_counter=lambda: link.now))
    stream = Prefetcher(range(10), [ClockSlot(number) for number in range(2)], link)  # type: ignore[misc]
    pieces = []

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
    link = ClockLink(lambda: 1.0)
    monkeypatch.setattr("offload.prefetcher.time", SimpleNamespace(perf_counter=lambda: link.now))
    stream = Prefetcher(range(4), [ClockSlot(number) for number in range(2)], link)  # type: ignore[misc]
    calls = []
    for _ in range(3):
        with stream.overlap(lambda: bool(calls.append(0))):
            for block in range(4):
                stream.need(block)
                stream.done(block)
    assert len(calls) == 2  # in the first pass nobody knows yet how long blocks are awaited
