"""Ranks that run one model: processes (gloo, NCCL) or threads.

Rank 0 controls the others. The NCCL backend follows torch's documentation and is untested, since it needs several GPUs.
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

from multigpu.failure_detector import FailureDetector, RankLost

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
FOREVER = timedelta(days=365)
"""Timeout of collectives; the failure detector finds ended ranks."""


class Group(Protocol):
    """Collectives, called in the same order by all ranks.

    Each raises RankLost if another rank has ended.
    """

    rank: int
    size: int

    def all_gather(self, part: Tensor, parts: Tensor) -> None:
        """Gather each rank's part into `parts`, by rank.

        `parts` is contiguous, [size, *part.shape].
        """
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's values into a contiguous tensor on all ranks."""
        ...

    def broadcast_object(self, value: Any = None) -> Any:
        """Return rank 0's value; processes need a picklable one."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""
        ...

    def close(self) -> None:
        """End the group: other threads raise RankLost, other processes end.

        Repeated calls have no effect.
        """
        ...


class ThreadGroup:
    """Ranks as threads of one process, for tests and for one GPU.

    NCCL does not support several ranks on one GPU.
    """

    def __init__(self, rank: int, size: int, meeting: Barrier, board: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._board = meeting, board

    @classmethod
    def new(cls, size: int) -> list[ThreadGroup]:
        """Return a group per rank."""
        meeting, board = Barrier(size), [None] * size
        return [cls(rank, size, meeting, board) for rank in range(size)]

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
        """Publish a value, and return a function's result on all ranks' values."""
        try:
            self._board[self.rank] = given
            self._meeting.wait()
            taken = take(self._board)
            self._meeting.wait()
            return taken
        except BrokenBarrierError:
            raise RankLost("another rank has ended; its own message is above") from None


class ProcessGroup:
    """Ranks as processes: CPU tensors go through gloo, GPU tensors through NCCL."""

    def __init__(
        self, rank: int, size: int, store: dist.Store, failure_detector: FailureDetector, device: torch.device
    ) -> None:
        """Join the ranks at `store`; a process has at most one group."""
        self.rank, self.size, self._failure_detector = rank, size, failure_detector
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        with failure_detector.watched():
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=FOREVER)
            if device.type != "cpu":  # NCCL connects at its first call, which takes long
                self.all_gather(torch.zeros(1, device=device), torch.zeros(size, 1, device=device))

    def all_gather(self, part: Tensor, parts: Tensor) -> None:
        with self._failure_detector.watched():  # as bytes: backends do not support all dtypes
            _all_gather(_bytes(parts), _bytes(part))

    def broadcast(self, tensor: Tensor) -> None:
        with self._failure_detector.watched():
            dist.broadcast(tensor, src=0)

    def broadcast_object(self, value: Any = None) -> Any:
        values = [value]
        with self._failure_detector.watched():
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        with self._failure_detector.watched():
            dist.barrier()

    def fail(self, reason: str) -> None:
        """Report the end of this rank, with the reason, to other ranks."""
        self._failure_detector.fail(reason)

    def close(self) -> None:
        self._failure_detector.close()
        if dist.is_initialized():
            with suppress(RuntimeError):  # other ranks may have ended first
                dist.destroy_process_group()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
