"""Offload plan and its inputs: sizes, limits, rates and drafters."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from typing import NamedTuple

DEPTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Draft depths with offloading.

There are few of them, since each depth is warmed up and passes are slow.
"""
NAIVE = "none"
"""Drafter name of plain decoding."""


class DoesNotFit(ValueError):
    """No plan within the limits; the message names the smallest sufficient limits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes of a model, from its checkpoint's header."""

    blocks: tuple[int, ...]
    """Bytes of each block's record."""
    fixed: int
    """Device bytes besides blocks and drafter.

    These are embedding, head, norms, KV cache, logits and libraries.
    """
    host: int = 0
    """Host bytes besides blocks, if the device has its own memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Memory limits in bytes; infinite: no limit, and enough memory."""

    device: float
    """Limit of device memory; on a CPU, of host memory."""
    host: float | None = None
    """Limit of host memory next to device memory; None on a CPU."""
    disk: float | None = math.inf
    """Free disk space for the block file.

    Infinite if the file exists; None without a disk tier.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Measured rates of this machine."""

    disk: float
    """Bytes per second from disk to host memory."""
    link: float = math.inf
    """Bytes per second from host to device; infinite on a CPU."""
    block: Mapping[int, float]
    """Rows of a step -> mean seconds of a block, interpolated."""
    rest: Mapping[int, float]
    """Rows of a step -> seconds outside blocks: embedding, head, sampling, launches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedDrafter:
    """Drafter that a plan may select, with its costs and acceptance."""

    name: str
    """Name for users, e.g. `share, 8 bits`."""
    resident: int
    """Bytes on the device."""
    step: float
    """Seconds to draft one more token."""
    cumulative_acceptance: tuple[float, ...]
    """Probabilities that the first 1, 2, ... draft tokens are accepted."""
    nodes: int = 0
    """Nodes of a draft tree, all verified; 0: drafts are chains."""
    seen: int = 0
    """Draft tokens observed for `cumulative_acceptance`, in addition to the prior."""
    bits: int | None = None
    """Bits of quantized weights."""
    blocks: tuple[int, ...] | None = None
    """Bytes of each block's record if drafts read some full weights.

    These weights are part of `resident`. None: `Sizes.blocks`.
    """
    resident_blocks: tuple[int, ...] = ()
    """Blocks that drafts run at full precision; not offloaded."""


def constant_acceptance(alpha: float) -> tuple[float, ...]:
    """Return `Drafter.cumulative_acceptance` for a constant acceptance probability `alpha`."""
    return tuple(accumulate(repeat(alpha, DEPTHS[-1]), operator.mul))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Placement of each block, draft depth, and predicted speed."""

    blocks: tuple[int, ...]
    """Bytes of each block's record."""
    from_host: tuple[int, ...]
    """Blocks offloaded to host memory."""
    from_disk: tuple[int, ...]
    """Blocks offloaded to the disk."""
    slots: int
    """Slots for offloaded blocks on the device."""
    host_slots: int
    """Slots in host memory for blocks from disk; 0 on a CPU."""
    drafter: str
    """Name of the drafter; NAIVE: plain decoding."""
    bits: int | None
    """Bits of the drafter's weights."""
    depth: int
    """Maximum draft tokens, or levels of a draft tree; 0: no drafts."""
    nodes: int
    """Nodes of a draft tree; 0: drafts are chains."""
    device_bytes: int
    """Device memory used."""
    host_bytes: int
    """Host memory used, if the device has its own memory."""
    transfer_s: float
    """Seconds of transfers per pass."""
    cumulative_acceptance: tuple[float, ...]
    """`Drafter.cumulative_acceptance`, up to `depth`."""
    round_s: float
    """Predicted seconds of a round."""
    tokens_per_second: float
    """Predicted speed for long answers."""
    naive_tokens_per_second: float
    """Predicted speed of plain decoding, with the drafter's memory for blocks."""
    reasons: tuple[Reason, ...]

    @property
    def num_blocks(self) -> int:
        """Number of records."""
        return len(self.blocks)

    @property
    def slot(self) -> int:
        """Bytes of a slot: those of the largest record."""
        return max(self.blocks)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the offloaded blocks' records."""
        return sum(self.blocks[block] for block in self.offloaded)

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Offloaded blocks, in order."""
        return tuple(sorted((*self.from_host, *self.from_disk)))

    @property
    def resident(self) -> tuple[int, ...]:
        """Resident blocks, in order."""
        offloaded = set(self.offloaded)
        return tuple(block for block in range(self.num_blocks) if block not in offloaded)

    @property
    def offloads(self) -> bool:
        """True if a block is offloaded."""
        return bool(self.from_host or self.from_disk)

    def speed_of(self, lengths: Sequence[int]) -> float:
        """Return the predicted tokens per second for answers of these lengths.

        The last round of an answer often accepts more tokens than the answer needs. Without lengths, returns
        `tokens_per_second`.
        """
        rounds = sum(_num_rounds(self.cumulative_acceptance, length) for length in lengths)
        return sum(lengths) / (rounds * self.round_s) if rounds else self.tokens_per_second


class Reason(NamedTuple):
    """Line of the printed plan: item, choice and reason."""

    what: str
    choice: str
    why: str


def _num_rounds(cumulative_acceptance: Sequence[float], tokens: int) -> float:
    """Return the expected number of rounds for `tokens` tokens."""
    ends = [
        before - after for before, after in pairwise((1.0, *cumulative_acceptance, 0.0))
    ]  # of drafts of which just so many hold
    rounds = [0.0]
    for left in range(1, tokens + 1):
        rounds.append(1 + sum(end * rounds[max(0, left - kept)] for kept, end in enumerate(ends, 1)))
    return rounds[tokens]


_UNITS: tuple[tuple[str, float], ...] = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def show_bytes(number: float, *, round_up: bool = False) -> str:
    """Format bytes with up to three digits and a decimal unit.

    `round_up`: round up, for limits.
    """
    if number == math.inf:
        return "no limit"
    name, unit = next(((name, unit) for name, unit in _UNITS if number >= unit), ("bytes", 1.0))
    value = number / unit
    digits = 0 if value >= 100 or unit == 1.0 else 1 if value >= 10 else 2
    shown: Callable[[float], float] = math.ceil if round_up else round
    return f"{shown(value * 10**digits) / 10**digits:g} {name}"
