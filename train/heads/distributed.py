"""Data-parallel training under a launcher (torchrun, accelerate launch).

Each process has the whole head and optimizer, reads its share of a step's rows, and applies the sum of all gradients.
Only process 0 writes. A single process needs neither accelerate nor torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from multigpu.launch import local_device
from sharesd.devices.selection import device_of

PATIENCE = timedelta(minutes=30)
"""Timeout of collectives.

The other processes wait while process 0 measures costs, which takes minutes.
"""


@dataclass(frozen=True, slots=True)
class Processes:
    """Rank (`index`), world size (`number`) and device of this process.

    All processes must call `sums`, `totals`, `follow_first` and `wait` in the same order. These raise RuntimeError if
    another process has ended.
    """

    index: int = 0
    number: int = 1
    device: str = "cpu"
    """Device of this process."""

    @property
    def first(self) -> bool:
        """True for process 0, which writes."""
        return self.index == 0

    def share(self, items: range) -> range:
        """Return this process's share of the items."""
        return items[self.index :: self.number]

    def sums(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Sum tensors over all processes, with the same bits in each.

        Every process passes equal numbers, shapes and dtypes, on its own device.
        """
        if self.number == 1:
            return tensors
        from accelerate.utils import reduce

        with _together():
            return reduce(list(tensors), "sum")

    def totals(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums of integers over all processes.

        All processes pass the same number of integers.
        """
        if self.number == 1:
            return list(numbers)
        return self.sums([torch.tensor(numbers, dtype=torch.int64, device=self.device)])[0].tolist()

    def follow_first(self, tensors: Sequence[Tensor]) -> None:
        """Copy process 0's values into the tensors of all processes."""
        if self.number > 1:
            from accelerate.utils import broadcast

            with _together():
                broadcast(list(tensors))

    def wait(self) -> None:
        """Wait until all processes have arrived."""
        if self.number > 1:
            from accelerate import PartialState

            with _together():
                PartialState().wait_for_everyone()

    def leave(self) -> None:
        """Wait for all processes, then leave the group.

        It is not called after a failure.
        """
        if self.number > 1:
            from accelerate import PartialState

            self.wait()
            PartialState().destroy_process_group()


ALONE = Processes()


def join(index: int, number: int, device: str) -> Processes:
    """Join the launcher's processes, on CUDA with one GPU each.

    `device`: auto, cpu or cuda. Raises ValueError for a missing device and for one GPU out of several.
    """
    given = device_of(device)
    if given.index is not None:
        raise ValueError(f"--device is {device} but {number} processes were launched, each on its own GPU; use cuda")
    own = local_device(given, number)
    from accelerate import PartialState

    PartialState(cpu=own.type == "cpu", backend="gloo" if own.type == "cpu" else "nccl", timeout=PATIENCE)
    return Processes(index, number, str(own))


def accelerate_started_one() -> bool:
    """Return True if accelerate launch started one process instead of several."""
    return {"MASTER_ADDR", "ACCELERATE_USE_CPU"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise RuntimeError(
            f"the processes cannot connect, probably because another one has stopped: {reason}"
        ) from error
