"""Packing of weights for the kernels of a CPU, and records of packed weights that later starts map."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from compile.block_linear import WIDENED, Activations, BlockLinear, BlockPart, Records
from compile.linear import QUANTIZED_INPUT_MULTIPLE, PackedLinear, QuantizedPackedLinear, WidenedLinear, Zeros
from compile.op_registry import HAS_TRITON, runs_triton
from quant.quantized_weight import QuantizedWeight
from sharesd.models.checkpoint import Progress
from sharesd_files import atomic_path, cache_root, warn_unwritable

_PAGE = mmap.ALLOCATIONGRANULARITY


class KeptRecords:
    """Records of a target's blocks: mapped, or loaded and then kept."""

    def __init__(self, target: str, key: str) -> None:
        """`target` has one file; records depend on `key`."""
        self._file = cache_root() / "records" / f"records-{hashlib.sha256(target.encode()).hexdigest()[:16]}.bin"
        self._key, self._linears = key, list[BlockLinear]()
        self._mapped = _map(self._file, key)

    @property
    def is_mapped(self) -> bool:
        """True if no bytes of blocks are needed."""
        return self._mapped is not None

    @property
    def mapped_bytes(self) -> int:
        """Bytes of weights that the system counts as free memory."""
        return sum(records.weight.nbytes for records in self._mapped or ())

    def linear(
        self, parts: Sequence[BlockPart], bias: Tensor | None, *, zeros: Zeros, activations: Activations
    ) -> BlockLinear:
        """Return the next linear, from the file or from its parts."""
        records = None if self._mapped is None else self._mapped[len(self._linears)]
        linear = BlockLinear(parts, bias, parts[0].in_features, activations=activations, zeros=zeros, records=records)
        self._linears.append(linear)
        return linear

    def keep(self, progress: Progress) -> None:
        """Write records that were not mapped; a full disk is not an error."""
        linears, self._linears = self._linears, []
        if self.is_mapped or not linears:
            return
        header = _header(self._key, linears)
        try:
            with atomic_path(self._file, durable=True) as fresh, fresh.open("wb") as stream:
                stream.write(header)
                for done, linear in enumerate(linears, 1):
                    stream.write(linear.weight.numpy().data)
                    stream.write(bytes(-stream.tell() % _PAGE))
                    progress("keeping weights for later starts", done, len(linears))
        except OSError as error:
            warn_unwritable(self._file, error, "weights are put into the order of the kernels at each start")


def _header(key: str, linears: Sequence[BlockLinear]) -> bytes:
    fields = {"key": key, "linears": [[linear.nbytes, linear.types] for linear in linears]}
    text = json.dumps(fields).encode() + b"\n"
    return text.ljust(_pages(len(text)))


def _map(file: Path, key: str) -> list[Records] | None:
    """Return the records of a file; None if they do not fit."""
    try:
        with file.open("rb") as stream:
            line = stream.readline()
            found = json.loads(line)
            linears = found["linears"]
            starts = list(accumulate((_pages(size) for size, _ in linears), initial=_pages(len(line))))
            if found["key"] != key or file.stat().st_size != starts[-1]:
                return None
            memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return [
        Records(torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start), types)
        for (size, types), start in zip(linears, starts, strict=False)
    ]


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def make_cpu_linear(
    parts: Sequence[Tensor | BlockPart],
    bias: Tensor | None,
    device: torch.device,
    *,
    dtype: torch.dtype,
    zeros: Zeros,
    activations: Activations,
    kept: KeptRecords | None = None,
) -> nn.Module:
    """Return a linear for the CPU kernel, of numbers or blocks."""
    assert device.type == "cpu"
    numbers, blocks = by_kind(parts)
    if [part.type for part in blocks] == [WIDENED]:
        return WidenedLinear(blocks[0].raw, zeros)
    if numbers:
        return PackedLinear.from_parts(numbers, bias, dtype=dtype, zeros=zeros)
    make = partial(BlockLinear, in_features=blocks[0].in_features) if kept is None else kept.linear
    return make(blocks, bias, activations=activations, zeros=zeros)


def by_kind(parts: Sequence[Tensor | BlockPart]) -> tuple[list[Tensor], list[BlockPart]]:
    """Return parts of numbers, or of blocks; next to blocks numbers are a `BlockPart`, too."""
    numbers = [part for part in parts if isinstance(part, Tensor)]
    blocks = [part for part in parts if isinstance(part, BlockPart)]
    assert not (numbers and blocks), "see `sharesd.models.weight_mapping`"
    return numbers, blocks


class CpuPacker:
    """Packer for the CPU kernel, see `quant.solved_linears.PackCache`."""

    layout = "1"

    def __init__(self, zeros: Zeros | None = None) -> None:
        """`zeros`: allocator of the weights' final memory."""
        self._zeros = zeros

    def __call__(self, weight: QuantizedWeight, bias: Tensor | None) -> QuantizedPackedLinear:
        """Pack a weight; ValueError for an unsupported number of inputs."""
        _N, K = weight.q.shape
        if K % QUANTIZED_INPUT_MULTIPLE:
            raise ValueError(
                f"a linear has {K} inputs, not a multiple of {QUANTIZED_INPUT_MULTIPLE}; use --compile regional"
            )
        codes_NK, offset_NG, bits = centred(weight)
        return QuantizedPackedLinear(codes_NK, weight.scale, offset_NG, bias, bits, zeros=self._zeros)

    def packed(self, linear: nn.Module) -> Tensor:
        assert isinstance(linear, QuantizedPackedLinear)
        return linear.weight

    def restored(
        self, packed: Tensor, bias: Tensor | None, shape: torch.Size, bits: int, group_size: int
    ) -> QuantizedPackedLinear:
        N, K = shape
        return QuantizedPackedLinear.restored(packed, bias, N, K, stored_bits(bits), group_size, zeros=self._zeros)


pack_for_cpu = CpuPacker()


def has_quantized_kernels(device: torch.device) -> bool:
    """True if this project's or gemlite's quantized linears can run."""
    return runs_triton(device) or (HAS_TRITON and find_spec("gemlite") is not None)


def centred(weight: QuantizedWeight) -> tuple[Tensor, Tensor, int]:
    """Return codes, offsets and stored bits (4 or 8).

    Weights are (code - middle) * scale + offset, with middle 8 for 4 bits and 128 for 8. Codes of 3 and 2 bits have 4.
    """
    container, middle = stored_bits(weight.bits), 2 ** (weight.bits - 1)
    shift = 2 ** (container - 1) - middle
    return weight.q + shift if shift else weight.q, (middle - weight.zero) * weight.scale, container


def stored_bits(bits: int) -> int:
    return 8 if bits == 8 else 4
