"""Weights on a GPU: layout of linears, memory, links for offloading, and packing for Triton's or gemlite's kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compile.block_linear import BlockPart
from compile.cuda import stream
from compile.cuda.bench import num_weight_copies, seconds_per_call
from compile.cuda.block_linear import BlockRowLinear
from compile.cuda.linear import DTYPES, replace_with_row_linears
from compile.cuda.lowbit import QuantizedRowLinear, StreamLinear
from compile.cuda.mixture import replace_with_row_mixtures, stack_outlines
from compile.linear import NotFinite
from compile.op_registry import runs_triton
from offload.pinned_transfer import CudaLink, PinnedMemory, link_rate
from offload.plan import show_bytes
from offload.transfer import Link
from quant.formats import QuantFormat
from quant.formats.hqq.gemlite import GEMLITE_BITS, GemliteLinear
from quant.quantized_weight import QuantizedWeight
from quant.solved_linears import PackFn
from sharesd.models.layers import empty_linear
from sharesd.weights.packing import by_kind, centred
from sharesd_files import JsonCache

OWN_CONTEXT = 2 * 10**9
"""Upper bound of this process's GPU bytes outside of torch's allocator."""


class CudaBackend:
    """As `CpuBackend`, with this project's Triton kernels if available, and with links from host memory."""

    kind: Literal["cuda"] = "cuda"

    def __init__(
        self, device: torch.device, dtype: torch.dtype, max_rows: int, batch: int, *, cuda: Any = torch.cuda
    ) -> None:
        self.device, self._dtype, self._cuda = device, dtype, cuda
        self._max_rows, self._batch = max_rows, batch

    def pack(self, linear: nn.Linear) -> nn.Module:
        if linear.weight.is_meta:
            return linear
        model = nn.Sequential(linear)
        self.pack_model(model)
        return model[0]

    def quantized_linear(self, weight: QuantizedWeight, form: QuantFormat) -> nn.Module:
        if (build := self.packer()) is not None:
            return build(weight, None)
        bits, group, dtype = weight.bits, weight.group_size, self._dtype
        return form.linear("a linear", weight, None, bits=bits, group_size=group, dtype=dtype, device=self.device)

    def stored_linear(self, part: BlockPart) -> nn.Module:
        return self.make_linear([part], None, self.device)

    def make_linear(self, parts: Sequence[Tensor | BlockPart], bias: Tensor | None, device: torch.device) -> nn.Module:
        """Return a linear of blocks for the Triton kernel; one of numbers is to be filled. Raises NotFinite."""
        numbers, blocks = by_kind(parts)
        if blocks:
            bias = None if bias is None else bias.to(device)
            return BlockRowLinear(blocks, bias, device, self._max_rows, self._batch, self._dtype)
        if not all(part.isfinite().all() for part in numbers):
            raise NotFinite("weights have NaN or infinite values")
        size = numbers[0].shape[1], sum(map(len, numbers))
        return empty_linear(*size, bias=bias is not None, dtype=self._dtype, device=device)

    def packer(self, *, streams: bool = False) -> PackFn | None:
        """Return the packer of quantized linears as `packer_for_cuda` does; None without Triton, too."""
        if not runs_triton(self.device):
            return None
        return packer_for_cuda(self.device, self._dtype, self._max_rows, self._batch, streams=streams)

    def pack_model(self, model: nn.Module) -> None:
        if runs_triton(self.device):
            replace_with_row_mixtures(model)
            replace_with_row_linears(model, self._max_rows, self._batch)

    def record_tensors(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return stack_outlines(weights)

    def finalize(self, model: nn.Module, keep: Collection[nn.Module] = ()) -> None:
        """Keep all weights; they are in their final memory."""

    def release_freed(self) -> None:
        self._cuda.empty_cache()

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def slots(self, num_bytes: int, count: int) -> list[Tensor]:
        return [self.allocate(num_bytes) for _ in range(count)]

    def time_calls(self, calls: Sequence[Callable[[], object]]) -> float:
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
        return PinnedMemory(num_bytes, cuda=self._cuda)

    def link(self, records: Mapping[int, PinnedMemory]) -> Link:
        return CudaLink(records, cuda=self._cuda)

    def link_rate(self) -> float:
        return link_rate(self.device, cuda=self._cuda)


def packer_for_cuda(
    device: torch.device, dtype: torch.dtype, max_rows: int, batch: int = 1, *, streams: bool = False
) -> PackFn | None:
    """Return the faster measured packer; None if Triton's lacks the dtype.

    `streams`: weights of 4 bits are packed for drafts of one row, if their shape allows it.
    """
    if dtype not in DTYPES:
        return None
    own = partial(pack_for_cuda, dtype=dtype, max_rows=max_rows, batch=batch)
    if streams:
        return partial(pack_for_cuda, dtype=dtype, max_rows=max_rows, batch=batch, streams=True)
    if _kernel_choice(device).load(str) != "gemlite" or find_spec("gemlite") is None:
        return own

    def build(weight: QuantizedWeight, bias: Tensor | None) -> nn.Module:
        return GemliteLinear(weight, bias, dtype) if weight.bits in GEMLITE_BITS else own(weight, bias)

    return build


def pack_for_cuda(
    weight: QuantizedWeight,
    bias: Tensor | None,
    *,
    dtype: torch.dtype,
    max_rows: int,
    batch: int = 1,
    streams: bool = False,
) -> nn.Module:
    codes_NK, offset_NG, bits = centred(weight)
    if streams and bits == 4:
        (N, K), device = codes_NK.shape, codes_NK.device
        group = K // weight.scale.shape[1]
        if stream.obstacle(N, K, group, stream.card_for(device)) is None:
            stream.prepare(device, group)
            return StreamLinear(codes_NK, weight.scale, offset_NG, bias, max_rows)
    return QuantizedRowLinear(codes_NK, weight.scale, offset_NG, bias, bits, dtype, max_rows, batch)


def choose_cuda_kernel(weight: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Time both kernels on one row, cache the faster one, return seconds."""
    builders: dict[str, Callable[..., nn.Module]] = {
        "own": partial(pack_for_cuda, max_rows=1),
        "gemlite": GemliteLinear,
    }
    x_MK = torch.randn(1, weight.q.shape[1], dtype=dtype, device=device)
    seconds, copies = {}, num_weight_copies(weight.q.numel() * weight.bits // 8, device)
    for name, build in builders.items():
        linears = [build(weight, None, dtype=dtype) for _ in range(copies)]
        seconds[name] = seconds_per_call([partial(linear, x_MK) for linear in linears])
    _kernel_choice(device).save(min(seconds, key=seconds.__getitem__))
    return seconds


def _kernel_choice(device: torch.device) -> JsonCache:
    """Return the choice, cached in `tiles`: bits of sums depend on it."""
    return JsonCache("tiles", "low-bits", torch.cuda.get_device_name(device))
