"""Processes of a launcher (torchrun, accelerate launch) that train one head together.

Each has the whole head with its optimizer, reads its share of a step's rows, and steps by the gradients of all. Process
0 alone writes. One process by itself waits for nobody, and needs neither accelerate nor torch.distributed.
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
"""What process 0 does while others wait, such as measuring costs, takes minutes. Launchers end who waits in vain."""


@dataclass(frozen=True, slots=True)
class Processes:
    """How many train together, and which one this is. All must call `sums`, `totals`, `follow_first` and `wait` in the
    same order; RuntimeError there where another one has ended.
    """

    index: int = 0
    number: int = 1
    device: str = "cpu"
    """Of this process."""

    @property
    def first(self) -> bool:
        """Whether this one writes."""
        return self.index == 0

    def share(self, items: range) -> range:
        """This process's part of what all do."""
        return items[self.index :: self.number]

    def sums(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Over all processes, to the same bits in each. Each gives as many, of the same shapes and dtypes, on its
        device.
        """
        if self.number == 1:
            return tensors
        from accelerate.utils import reduce

        with _together():
            return reduce(list(tensors), "sum")

    def totals(self, numbers: Sequence[int]) -> list[int]:
        """Sums of whole numbers over all processes, each of which gives as many."""
        if self.number == 1:
            return list(numbers)
        return self.sums([torch.tensor(numbers, dtype=torch.int64, device=self.device)])[0].tolist()

    def follow_first(self, tensors: Sequence[Tensor]) -> None:
        """Have process 0's values in all tensors of all processes."""
        if self.number > 1:
            from accelerate.utils import broadcast

            with _together():
                broadcast(list(tensors))

    def wait(self) -> None:
        """Until all are here."""
        if self.number > 1:
            from accelerate import PartialState

            with _together():
                PartialState().wait_for_everyone()

    def leave(self) -> None:
        """At the end, once all are there. A process that fails just ends: others may never come."""
        if self.number > 1:
            from accelerate import PartialState

            self.wait()
            PartialState().destroy_process_group()


ALONE = Processes()


def join(index: int, number: int, device: str) -> Processes:
    """Meet the other processes of the launcher, on a GPU of its own each where `device` (auto, cpu, cuda) is that.

    ValueError for a device that is not there or is one of several GPUs, and without accelerate.
    """
    given = device_of(device)
    if given.index is not None:
        raise ValueError(f"--device is {device} and {number} processes were launched, with a GPU each; give cuda")
    own = local_device(given, number)
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ValueError(f"{number} processes need accelerate ({error}); run: pip install accelerate") from error
    PartialState(cpu=own.type == "cpu", backend="gloo" if own.type == "cpu" else "nccl", timeout=PATIENCE)
    return Processes(index, number, str(own))


def launched_in_vain() -> bool:
    """Whether accelerate launch was asked for several processes and has started one, as it does without GPUs."""
    return {"MASTER_ADDR", "ACCELERATE_USE_CPU"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        said = " ".join(str(error).split()).partition(". ")[0]
        raise RuntimeError(f"the processes do not come together, mostly since another one has ended: {said}") from error
