"""Backends of weights: layout of linears, memory, and links for offloading.

Records are on a disk with slots in host memory (CPU), or in pinned host memory with slots on the device (GPU).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compile.adaptive_threads import STEP_THREADS
from compile.block_linear import BlockLinear, BlockPart
from compile.cpp_extension import release_freed_memory
from compile.huge_pages import HugePageArena, huge_pages, weights_on_huge_pages
from compile.linear import PackedLinear, pack_linears
from compile.op_registry import runs_triton
from offload.plan import show_bytes
from offload.transfer import Link, host_slots
from quant.formats import QuantFormat
from quant.quantized_weight import QuantizedWeight
from sharesd.weights.packing import make_cuda_linear, pack_for_cpu, packer_for_cuda

if TYPE_CHECKING:
    from offload.pinned_transfer import PinnedMemory

OWN_CONTEXT = 2 * 10**9
"""Upper bound of this process's GPU bytes outside of torch's allocator."""
SWEEPS = 4


class CpuBackend:
    """Layout and memory of weights on a CPU; `CudaBackend` has the same methods."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.arena = HugePageArena()

    def pack(self, linear: nn.Linear) -> nn.Module:
        """Return a linear in the device's layout; meta tensors stay meta."""
        return PackedLinear(linear.weight.detach(), None)

    def quantized_linear(self, weight: QuantizedWeight, form: QuantFormat) -> nn.Module:
        """Return a linear without a bias; `form` has a solver."""
        return pack_for_cpu(weight, None)

    def stored_linear(self, part: BlockPart) -> nn.Module:
        """Return a linear of blocks."""
        return BlockLinear([part], None, part.in_features)

    def pack_model(self, model: nn.Module) -> None:
        """Replace all plain linears of a model by those of the device."""
        pack_linears(model)

    def finalize(self, model: nn.Module, keep: Collection[nn.Module] = ()) -> None:
        """Move the linears' weights to their final memory, except those of `keep`."""
        weights_on_huge_pages(model, keep=keep)

    def release_freed(self) -> None:
        release_freed_memory()

    def allocate(self, num_bytes: int) -> Tensor:
        """Return memory of a resident record, uint8 [num_bytes]."""
        return huge_pages(num_bytes)

    def zeros(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros that are freed on their own, unlike the arena's."""
        return huge_pages(math.prod(size) * dtype.itemsize).view(dtype).view(*size)

    def slots(self, num_bytes: int, count: int) -> list[Tensor]:
        """Return `count` slots for records, uint8 [num_bytes]."""
        return host_slots(num_bytes, count)

    def time_calls(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the mean seconds of calls, which together exceed caches: at the fastest, by all threads or by one."""
        sizes = {STEP_THREADS.size} if STEP_THREADS.fixed else {STEP_THREADS.size, 1}
        best = [math.inf] * len(calls)  # of each: with other programs running, few sweeps over all are undisturbed
        try:
            for size, _, (number, call) in product(sizes, range(SWEEPS), enumerate(calls)):
                torch.set_num_threads(size)
                started = time.perf_counter()
                call()
                best[number] = min(best[number], time.perf_counter() - started)
        finally:
            torch.set_num_threads(STEP_THREADS.size)
        return sum(best) / len(calls)


class CudaBackend:
    """Weights on a GPU, with this project's Triton kernels if available."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, max_rows: int, batch: int, *, cuda: Any = torch.cuda
    ) -> None:
        self.device, self._dtype, self._max_rows, self._batch, self._cuda = device, dtype, max_rows, batch, cuda

    def pack(self, linear: nn.Linear) -> nn.Module:
        if linear.weight.is_meta:
            return linear
        model = nn.Sequential(linear)
        self.pack_model(model)
        return model[0]

    def quantized_linear(self, weight: QuantizedWeight, form: QuantFormat) -> nn.Module:
        build = None
        if runs_triton(self.device):
            build = packer_for_cuda(self.device, self._dtype, self._max_rows, self._batch)
        if build is not None:
            return build(weight, None)
        bits, group, dtype = weight.bits, weight.group_size, self._dtype
        return form.linear("a linear", weight, None, bits=bits, group_size=group, dtype=dtype, device=self.device)

    def stored_linear(self, part: BlockPart) -> nn.Module:
        return make_cuda_linear(
            [part], None, device=self.device, dtype=self._dtype, max_rows=self._max_rows, batch=self._batch
        )

    def pack_model(self, model: nn.Module) -> None:
        if runs_triton(self.device):
            from compile.cuda.linear import replace_with_row_linears  # on GPUs only
            from compile.cuda.mixture import replace_with_row_mixtures

            replace_with_row_mixtures(model)
            replace_with_row_linears(model, self._max_rows, self._batch)

    def finalize(self, model: nn.Module, keep: Collection[nn.Module] = ()) -> None:
        """Keep all weights; they are in their final memory."""

    def release_freed(self) -> None:
        self._cuda.empty_cache()

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def slots(self, num_bytes: int, count: int) -> list[Tensor]:
        return [self.allocate(num_bytes) for _ in range(count)]

    def time_calls(self, calls: Sequence[Callable[[], object]]) -> float:
        from compile.cuda.bench import seconds_per_call  # on GPUs only

        return seconds_per_call(calls)

    def free_memory(self) -> int:
        return int(self._cuda.mem_get_info(self.device)[0])

    def used_by_others(self) -> str:
        free, total = self._cuda.mem_get_info(self.device)
        own = torch.cuda.memory_reserved(self.device) if torch.cuda.is_initialized() else 0
        others = total - free - own
        return f" ({show_bytes(others)} of {show_bytes(total)} are held by others)" if others > OWN_CONTEXT else ""

    def pinned(self, num_bytes: int) -> PinnedMemory:
        """Return pinned host memory; ValueError if no more can be pinned."""
        from offload.pinned_transfer import PinnedMemory

        return PinnedMemory(num_bytes, cuda=self._cuda)

    def link(self, records: Mapping[int, PinnedMemory]) -> Link:
        from offload.pinned_transfer import CudaLink

        return CudaLink(records, cuda=self._cuda)

    def link_rate(self) -> float:
        from offload.pinned_transfer import link_rate

        return link_rate(self.device, cuda=self._cuda)


WeightBackend = CpuBackend | CudaBackend


def backend_for(device: torch.device, dtype: torch.dtype, max_rows: int, batch: int) -> WeightBackend:
    return CudaBackend(device, dtype, max_rows, batch) if device.type == "cuda" else CpuBackend()
