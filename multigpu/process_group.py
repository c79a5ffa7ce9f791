"""Ranks that run one model together, and what they exchange: processes (gloo on CPUs, NCCL on GPUs) or threads.

Rank 0 leads. The way over NCCL is written to torch's documentation and has never run: it takes several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Barrier, BrokenBarrierError
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from multigpu.failure_detector import Lifeline, RankLost

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
FOREVER = timedelta(days=365)
"""Ranks wait for the next step however long nobody asks for one; the lifeline tells of those that have ended."""


class Group(Protocol):
    """All ranks call the same methods in the same order. Each raises RankLost where another rank has ended."""

    rank: int
    size: int

    def all_gather(self, part: Tensor, parts: Tensor) -> None:
        """`parts` [size, *part.shape], contiguous, becomes what the ranks give, in their order."""
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """A contiguous tensor becomes that of rank 0."""
        ...

    def broadcast_object(self, value: Any = None) -> Any:
        """What rank 0 gives: anything that can be pickled, or with threads anything."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        ...

    def close(self) -> None:
        """Rank 0 needs the others no more: they raise RankLost, or end if they are processes. May be called twice."""
        ...


class ThreadGroup:
    """Ranks that are threads of one process, for tests, and for several ranks on one GPU, which NCCL refuses."""

    def __init__(self, rank: int, size: int, meeting: Barrier, desk: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._desk = meeting, desk

    @classmethod
    def new(cls, size: int) -> list[ThreadGroup]:
        """One for each rank."""
        meeting, desk = Barrier(size), [None] * size
        return [cls(rank, size, meeting, desk) for rank in range(size)]

    def all_gather(self, part: Tensor, parts: Tensor) -> None:
        self._exchange(part, lambda given: [parts[rank].copy_(other) for rank, other in enumerate(given)])

    def broadcast(self, tensor: Tensor) -> None:
        self._exchange(tensor, lambda given: tensor.copy_(given[0]) if self.rank else None)

    def broadcast_object(self, value: Any = None) -> Any:
        return self._exchange(value, lambda given: given[0])

    def barrier(self) -> None:
        self._exchange(None, lambda given: None)

    def close(self) -> None:
        self._meeting.abort()

    def _exchange(self, given: Any, take: Callable[[list[Any]], Any]) -> Any:
        """Lay something on the desk and take what is needed of what all have laid there."""
        try:
            self._desk[self.rank] = given
            self._meeting.wait()
            taken = take(self._desk)
            self._meeting.wait()
            return taken
        except BrokenBarrierError:
            raise RankLost("another rank has ended") from None


class ProcessGroup:
    """Ranks that are processes: tensors on CPUs go through gloo, those on GPUs through NCCL."""

    def __init__(self, rank: int, size: int, store: dist.Store, lifeline: Lifeline, device: torch.device) -> None:
        """`store` is where all ranks meet. One group at a time may exist in a process."""
        self.rank, self.size, self._lifeline = rank, size, lifeline
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        with lifeline.watched():
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=FOREVER)
            if device.type != "cpu":  # NCCL connects at its first call, which takes long
                self.all_gather(torch.zeros(1, device=device), torch.zeros(size, 1, device=device))

    def all_gather(self, part: Tensor, parts: Tensor) -> None:
        with self._lifeline.watched():  # as bytes, whatever the backend knows of dtypes
            _all_gather(_bytes(parts), _bytes(part))

    def broadcast(self, tensor: Tensor) -> None:
        with self._lifeline.watched():
            dist.broadcast(tensor, src=0)

    def broadcast_object(self, value: Any = None) -> Any:
        values = [value]
        with self._lifeline.watched():
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        with self._lifeline.watched():
            dist.barrier()

    def fail(self, reason: str) -> None:
        """This rank ends, for this reason: the others shall say so."""
        self._lifeline.fail(reason)

    def close(self) -> None:
        self._lifeline.close()
        if dist.is_initialized():
            with suppress(RuntimeError):  # others may have gone first
                dist.destroy_process_group()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
