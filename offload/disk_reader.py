"""Link from a file to host memory: threads read pieces of records.

Direct reads, which bypass the page cache, are used if they are faster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread
from typing import NamedTuple

from torch import Tensor

from offload.transfer import Copy, LinkError, host_memory

PAGE = 4096
"""Alignment of direct reads, in the file and in memory."""
PIECE = 2**22
"""Bytes that a thread reads at a time."""
THREADS = 4
PROBE_BYTES = 2**26
"""Maximum bytes read to compare direct with buffered reads."""


class _Piece(NamedTuple):
    copy: _FileCopy
    memory: memoryview
    offset: int


class DiskLink:
    """Link that reads records of a file into page-aligned slots.

    With `direct`, reads bypass the page cache (O_DIRECT). Without, read pages are dropped from the page cache: repeated
    scans over more than its size would have no cache hits. None selects the faster of the two for this file.
    """

    def __init__(
        self, path: Path, offsets: Mapping[int, int], *, direct: bool | None = None, threads: int = THREADS
    ) -> None:
        """Open a file; raises LinkError if opening fails.

        `offsets`: first byte of each block's record in the file, a multiple of `PAGE`.
        """
        if direct is None:
            direct = faster_direct(path)
        self.path, self.direct, self._offsets = path, direct, offsets
        self._descriptor = _opened(path, direct)
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        self._state = Condition()  # guards the copies' counts and what follows
        self._num_open, self._open_since = 0, 0.0  # copies under way, and since when there have been any
        self._busy_s = 0.0  # before that
        self._closed = False
        self._threads = [Thread(target=self._work, name="offload", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def busy_s(self) -> float:
        with self._state:
            return self._busy_s + (time.perf_counter() - self._open_since if self._num_open else 0.0)

    def mark(self) -> None:
        """Return None: on a CPU, computation ends before the host continues."""

    def start(self, block: int, slot: Tensor, after: None = None) -> Copy:
        assert slot.data_ptr() % PAGE == 0 and slot.nbytes % PAGE == 0
        if self._closed:
            raise LinkError(f"block {block} is not read from {self.path}: the link was closed")
        memory, offset = slot.numpy().data, self._offsets[block]
        begins = range(0, slot.nbytes, PIECE)
        copy = _FileCopy(block, len(begins), self._state)
        with self._state:
            self._num_open += 1
            if self._num_open == 1:
                self._open_since = time.perf_counter()
        for begin in begins:
            self._pieces.put(_Piece(copy, memory[begin : begin + PIECE], offset + begin))
        return copy

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True  # pieces that no thread has begun are not read
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._descriptor)

    def _work(self) -> None:
        while (piece := self._pieces.get()) is not None:
            problem = None
            if self._closed:
                problem = "the link was closed"
            elif piece.copy.problem is None:
                try:
                    self._read(piece.memory, piece.offset)
                except OSError as error:
                    problem = error.strerror or str(error)
            self._finished(piece.copy, problem)

    def _read(self, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(self._descriptor, [memory[done:]], offset + done)
            if count == 0:
                raise OSError(f"the file ends at byte {offset + done}")
            done += count
        if not self.direct:
            os.posix_fadvise(self._descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)

    def _finished(self, copy: _FileCopy, problem: str | None) -> None:
        with self._state:
            if problem is not None and copy.problem is None:
                copy.problem = f"block {copy.block} cannot be read from {self.path}: {problem}"
            copy.left -= 1
            if not copy.left:
                self._num_open -= 1
                if not self._num_open:
                    self._busy_s += time.perf_counter() - self._open_since
                copy.arrived = time.perf_counter()
                self._state.notify_all()


class _FileCopy:
    """Read of a record in progress."""

    def __init__(self, block: int, pieces: int, state: Condition) -> None:
        self.block, self.left, self._state = block, pieces, state
        self.problem: str | None = None
        self.arrived: float | None = None

    def wait(self) -> None:
        with self._state:
            self._state.wait_for(lambda: not self.left)
        if self.problem is not None:
            raise LinkError(self.problem)


def read_rate(path: Path, *, direct: bool) -> float:
    """Return the bytes per second of reading a file from its beginning.

    The bytes are first dropped from the page cache, so that the disk is measured. Raises LinkError if the file cannot
    be read.
    """
    num_bytes = min(PROBE_BYTES, path.stat().st_size) // PAGE * PAGE
    if not num_bytes:
        raise LinkError(f"{path} is too short to tell how fast it is read")
    memory = host_memory(num_bytes)
    link = DiskLink(path, {0: 0}, direct=direct)
    try:
        os.posix_fadvise(link._descriptor, 0, num_bytes, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        link.start(0, memory).wait()
        return num_bytes / (time.perf_counter() - started)
    finally:
        link.close()


def faster_direct(path: Path) -> bool:
    """Return True if direct reads are at least as fast as buffered.

    Returns False if the file system does not support direct reads.
    """
    try:
        return read_rate(path, direct=True) >= read_rate(path, direct=False)
    except LinkError:
        return False


def _opened(path: Path, direct: bool) -> int:
    try:
        return os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    except OSError as error:
        how = "for direct reads" if direct else "for reading"
        raise LinkError(f"{path} cannot be opened {how}: {error.strerror}") from error
