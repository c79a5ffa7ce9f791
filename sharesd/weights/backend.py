"""How devices differ where weights may live elsewhere: how linears lie, what memory there is, what moves records.

On a CPU records lie on a disk, packed for the kernels, and come into slots in the host's memory. Those of a GPU lie in
pinned memory of the host, and come into slots on the device: this has never run on one; tests run it on a CPU behind a
link that is made up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compile.adaptive_threads import CREW
from compile.cpp_extension import give_back_freed_memory
from compile.cuda.bench import seconds_per_call
from compile.huge_pages import huge_pages, weights_on_huge_pages
from compile.linear import PackedLinear, pack_linears
from compile.op_registry import runs_triton
from offload.pinned_transfer import CudaLink, PinnedMemory, link_rate
from offload.planner import show_bytes
from offload.transfer import Link, host_slots
from quant.hqq import QuantizedWeight
from quant.quantized_linear import build_low
from sharesd.weights.packing import builder_for_cuda, packed_for_cpu

OWN_CONTEXT = 2 * 10**9
"""Bytes that this process may hold of a GPU besides what torch knows of, amply."""
SWEEPS = 4
"""Times that calls are timed on a CPU."""


class Home(Protocol):
    """Where a model is computed."""

    device: torch.device

    def laid(self, linear: nn.Linear) -> nn.Module:
        """A linear with its `weight` as the device wants it; of one on the meta device, without memory."""
        ...

    def low(self, weight: QuantizedWeight) -> nn.Module:
        """A quantized linear that drafts, without a bias."""
        ...

    def lay(self, model: nn.Module) -> None:
        """Replace all plain linears of a model by those that run."""
        ...

    def settle(self, model: nn.Module, keep: Collection[nn.Module] = ()) -> None:
        """Put the linears' weights, but for those of `keep`, where they shall stay."""
        ...

    def give_back(self) -> None:
        """What was freed goes back to the system."""
        ...

    def memory(self, num_bytes: int) -> Tensor:
        """For a record that stays: uint8 [num_bytes]."""
        ...

    def slots(self, num_bytes: int, count: int) -> list[Tensor]:
        """So many slots for records, uint8 [num_bytes]."""
        ...

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Of each of these calls, which together need more than caches hold."""
        ...


class OnCpu:
    """Weights are packed for the CPU kernels."""

    device = torch.device("cpu")

    def laid(self, linear: nn.Linear) -> nn.Module:
        return PackedLinear(linear.weight.detach(), None)

    def low(self, weight: QuantizedWeight) -> nn.Module:
        return packed_for_cpu(weight, None)

    def lay(self, model: nn.Module) -> None:
        pack_linears(model)

    def settle(self, model: nn.Module, keep: Collection[nn.Module] = ()) -> None:
        weights_on_huge_pages(model, keep=keep)

    def give_back(self) -> None:
        give_back_freed_memory()

    def memory(self, num_bytes: int) -> Tensor:
        return huge_pages(num_bytes)

    def slots(self, num_bytes: int, count: int) -> list[Tensor]:
        return host_slots(num_bytes, count)

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """By one thread where that is faster, as steps come to do beside programs that keep cores busy."""
        sizes = {CREW.size} if CREW.fixed else {CREW.size, 1}
        best = [math.inf] * len(calls)  # of each: beside other programs, hardly a sweep over all is undisturbed
        try:
            for size, _, (number, call) in product(sizes, range(SWEEPS), enumerate(calls)):
                torch.set_num_threads(size)
                started = time.perf_counter()
                call()
                best[number] = min(best[number], time.perf_counter() - started)
        finally:
            torch.set_num_threads(CREW.size)
        return sum(best) / len(calls)


class OnGpu:
    """A device with memory of its own. Weights lie as they are; where Triton runs, our kernels multiply with them."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, most_rows: int, batch: int, *, cuda: Any = torch.cuda
    ) -> None:
        """`most_rows` of steps, of each of `batch` sequences. The device is the current one."""
        self.device, self._dtype, self._most_rows, self._batch, self._cuda = device, dtype, most_rows, batch, cuda

    def laid(self, linear: nn.Linear) -> nn.Module:
        if linear.weight.is_meta:
            return linear
        model = nn.Sequential(linear)
        self.lay(model)
        return model[0]

    def low(self, weight: QuantizedWeight) -> nn.Module:
        build = None
        if runs_triton(self.device):
            build = builder_for_cuda(self.device, self._dtype, self._most_rows, self._batch)
        return build_low("a linear", weight, None, dtype=self._dtype) if build is None else build(weight, None)

    def lay(self, model: nn.Module) -> None:
        if runs_triton(self.device):
            from compile.cuda.linear import use_row_linears  # on GPUs only

            use_row_linears(model, self._most_rows, self._batch)

    def settle(self, model: nn.Module, keep: Collection[nn.Module] = ()) -> None:
        """Nothing: they are where they shall be."""

    def give_back(self) -> None:
        self._cuda.empty_cache()

    def memory(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def slots(self, num_bytes: int, count: int) -> list[Tensor]:
        return [self.memory(num_bytes) for _ in range(count)]

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        return seconds_per_call(calls)

    def free_memory(self) -> int:
        """Bytes of the device that nobody has taken."""
        return int(self._cuda.mem_get_info(self.device)[0])

    def held_by_others(self) -> str:
        """Remark on memory that other processes hold; "" where it is little."""
        free, total = self._cuda.mem_get_info(self.device)
        own = torch.cuda.memory_reserved(self.device) if torch.cuda.is_initialized() else 0
        others = total - free - own
        return f" ({show_bytes(others)} of {show_bytes(total)} are held by others)" if others > OWN_CONTEXT else ""

    def pinned(self, num_bytes: int) -> PinnedMemory:
        """Memory of the host from which records travel. ValueError where it cannot be had."""
        return PinnedMemory(num_bytes, cuda=self._cuda)

    def link(self, records: Mapping[int, PinnedMemory]) -> Link:
        """What brings these records."""
        return CudaLink(records, cuda=self._cuda)

    def link_rate(self) -> float:
        """Bytes a second that it brings, measured."""
        return link_rate(self.device, cuda=self._cuda)


def home_of(device: torch.device, dtype: torch.dtype, most_rows: int, batch: int) -> Home:
    """Of models on this device, see `OnGpu`."""
    return OnGpu(device, dtype, most_rows, batch) if device.type == "cuda" else OnCpu()
