"""Backends of weights: layout of linears, and memory. `cuda_backend` has that of GPUs.

Offloaded records are on a disk with slots in host memory (CPU), or in pinned host memory with slots on the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, nn

from compile.adaptive_threads import STEP_THREADS
from compile.block_linear import BlockLinear, BlockPart
from compile.cpp_extension import release_freed_memory
from compile.huge_pages import HugePageArena, huge_pages, weights_on_huge_pages
from compile.linear import PackedLinear, pack_linears
from offload.transfer import host_slots
from quant.formats import QuantFormat
from quant.quantized_weight import QuantizedWeight
from sharesd.weights.packing import pack_for_cpu

if TYPE_CHECKING:
    from sharesd.weights.cuda_backend import CudaBackend

SWEEPS = 4


class CpuBackend:
    """Layout and memory of weights on a CPU; `CudaBackend` has the same methods."""

    kind: Literal["cpu"] = "cpu"
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

    def record_tensors(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a packed block, by name.

        `weights`: those of its linears by path, on the meta device.
        """
        return {f"{path}.weight": weight for path, weight in weights.items()}

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


WeightBackend: TypeAlias = "CpuBackend | CudaBackend"
"""`kind` says which; only a GPU's has links, and memory of its own."""


def backend_for(device: torch.device, dtype: torch.dtype, max_rows: int, batch: int) -> WeightBackend:
    if device.type != "cuda":
        return CpuBackend()
    from sharesd.weights.cuda_backend import CudaBackend  # kernels of GPUs

    return CudaBackend(device, dtype, max_rows, batch)
