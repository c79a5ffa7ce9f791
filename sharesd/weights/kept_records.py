"""Records of stored weights in a file that later starts map.

    header   JSON: key, and of each linear the bytes and its parts' types; padded to whole pages
    records  of one linear after the other, in the order of loading, at whole pages

A mapped file is neither read nor repacked, and several processes share its memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from compile.block_linear import Activations, BlockLinear, BlockPart, Records
from compile.linear import Zeros
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
        """Write records that were not mapped; a full disk is no error."""
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
