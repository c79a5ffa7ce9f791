"""Sizes, limits, rates and drafters that an offload plan is made of, and the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from typing import NamedTuple

DEPTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Draft depths with offloading: coarse, since each is warmed up and passes are slow."""
NAIVE = "none"
"""Name of the drafter that is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes of a model, from its checkpoint's header."""

    num_blocks: int
    block: int
    """A block's record."""
    fixed: int
    """Bytes on the device with any drafter: embedding, head, norms, KV, logits, libraries."""
    host: int = 0
    """The same in host memory, if the device has its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Memory limits; infinite if there is no limit and enough memory."""

    device: float
    """Memory of the device; on a CPU, of the host."""
    host: float | None = None
    """The host's, where the device has its own; None on a CPU."""
    disk: float | None = math.inf
    """Free space for the file; infinite if the file exists, None if there is no disk tier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Measured rates of this machine."""

    disk: float
    """From the disk into the host's memory."""
    link: float = math.inf
    """From the host's memory to the device; infinite where these are one."""
    block: Mapping[int, float]
    """Rows of a step -> seconds of one block; other rows are interpolated."""
    rest: Mapping[int, float]
    """Rows of a step -> seconds of embedding, head, sampling and launches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafter:
    """A way of drafting that the plan may choose."""

    name: str
    """Name for users, e.g. `share, 8 bits`."""
    resident: int
    """Bytes that it keeps on the device."""
    step: float
    """Seconds to draft one more token."""
    cumulative_acceptance: tuple[float, ...]
    """Probabilities that the first 1, 2, ... draft tokens are accepted."""
    nodes: int = 0
    """Nodes of draft trees, all of them verified; 0: drafts are chains."""
    seen: int = 0
    """Draft tokens measured for `cumulative_acceptance`, besides the prior."""
    bits: int | None = None
    """Bits of quantized weights."""
    block: int | None = None
    """Bytes of a block's record, if drafts read some full weights (part of `resident`)."""
    resident_blocks: tuple[int, ...] = ()
    """Blocks that drafts run at full precision, and that are not offloaded."""


def constant_acceptance(alpha: float) -> tuple[float, ...]:
    """Return `Drafter.cumulative_acceptance` for a constant acceptance probability."""
    return tuple(
        accumulate(repeat(alpha, DEPTHS[-1]), lambda cumulative_acceptance, each: cumulative_acceptance * each)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Place of each block, depth of drafts, and predicted speed."""

    num_blocks: int
    block: int
    """Bytes of a record."""
    from_host: tuple[int, ...]
    """Blocks offloaded to host memory."""
    from_disk: tuple[int, ...]
    """Blocks offloaded to the disk."""
    slots: int
    """Records of offloaded blocks that fit on the device."""
    host_slots: int
    """The same in host memory, if blocks pass through it."""
    drafter: str
    """Name of the drafter; NAIVE for none."""
    bits: int | None
    """Bits of the drafter's weights."""
    depth: int
    """Most draft tokens, or levels of a tree; 0 = none."""
    nodes: int
    """Nodes of a draft tree; 0: drafts are chains."""
    device_bytes: int
    """Memory taken on the device."""
    host_bytes: int
    """Memory taken of the host, if the device has its own."""
    transfer_s: float
    """Seconds of transfers in a pass."""
    cumulative_acceptance: tuple[float, ...]
    """`Drafter.cumulative_acceptance` of drafts of this depth."""
    round_s: float
    """Seconds of a round, predicted."""
    tokens_per_second: float
    """Predicted, of long answers."""
    naive_tokens_per_second: float
    """Predicted for plain decoding, with all memory for blocks."""
    reasons: tuple[Reason, ...]

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Offloaded blocks, in order."""
        return tuple(sorted((*self.from_host, *self.from_disk)))

    @property
    def resident(self) -> tuple[int, ...]:
        """Blocks that stay on the device, in order."""
        offloaded = set(self.offloaded)
        return tuple(block for block in range(self.num_blocks) if block not in offloaded)

    @property
    def offloads(self) -> bool:
        """True if a block is offloaded."""
        return bool(self.from_host or self.from_disk)

    def speed_of(self, lengths: Sequence[int]) -> float:
        """Return the predicted tokens per second of answers of these lengths.

        The last round of an answer seldom uses all that it confirms. Without lengths: `tokens_per_second`.
        """
        rounds = sum(_num_rounds(self.cumulative_acceptance, length) for length in lengths)
        return sum(lengths) / (rounds * self.round_s) if rounds else self.tokens_per_second


class Reason(NamedTuple):
    """A line of the plan."""

    what: str
    choice: str
    why: str


def _num_rounds(cumulative_acceptance: Sequence[float], tokens: int) -> float:
    """Return the mean number of rounds for so many tokens."""
    ends = [
        before - after for before, after in pairwise((1.0, *cumulative_acceptance, 0.0))
    ]  # of drafts of which just so many hold
    rounds = [0.0]
    for left in range(1, tokens + 1):
        rounds.append(1 + sum(end * rounds[max(0, left - kept)] for kept, end in enumerate(ends, 1)))
    return rounds[tokens]
