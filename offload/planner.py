"""What stays, what travels, and how far to draft: a pure function from sizes, limits and measured rates to a plan.

A pass through the model takes as long as its slower half: the link that brings blocks, or the compute on them; resident
blocks come on top. (What the first slots receive while drafts are made is a gain of a few per cent that is not
counted.) So with most blocks travelling, a step of many rows costs what a step of one costs, and what counts
is how many tokens a pass confirms. Memory for drafts is taken from resident blocks, and pays itself back that way.

Memory may have three tiers: the device, the host's behind a link, a disk behind that. On a CPU the first two are one.
Bytes are bytes, times are seconds, rates bytes a second.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from typing import NamedTuple

DEPTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""How far drafts may go where weights travel: a coarse ladder, since each depth is warmed up, and passes are slow."""
IN_FLIGHT = 16 * 2**20
"""Bytes that are always asked for ahead, so that a link is never idle between two small blocks (if a quarter of the
blocks have so many)."""
NAIVE = "none"
"""Name of the drafter that is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes of a model, from its checkpoint's header."""

    num_blocks: int
    block: int
    """A block's record."""
    fixed: int
    """What has to be on the device whatever drafts: embedding, head, norms, KV, logits, the libraries' own."""
    host: int = 0
    """The same in the host's memory, where that is another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Memory that may be taken; infinite where nobody set a limit and there is enough."""

    device: float
    """Where it computes. On a CPU this is the host's memory."""
    host: float | None = None
    """The host's, where the device has its own; None on a CPU."""
    disk: float | None = math.inf
    """Free space for the store; infinite where it is already there, None where nothing may travel from a disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What was measured on this machine."""

    disk: float
    """From the disk into the host's memory."""
    link: float = math.inf
    """From the host's memory to the device; infinite where these are one."""
    block: Mapping[int, float]
    """Rows of a step -> seconds for one block; interpolated between, and continued behind the last."""
    rest: Mapping[int, float]
    """Rows of a step -> seconds for all but the blocks: embedding, head, choice, launches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafter:
    """A way of drafting that the plan may choose."""

    name: str
    """As users know it, e.g. `share, 8 bits`."""
    resident: int
    """Bytes that it keeps on the device."""
    step: float
    """Seconds to draft one more token."""
    held: tuple[float, ...]
    """Probability that the first 1, 2, ... drafted tokens all hold. See `steady`."""
    nodes: int = 0
    """Of draft trees, all of which are verified, whatever their depth; 0: drafts are chains."""
    seen: int = 0
    """Drafted tokens that tell of `held` beside what is assumed."""
    bits: int | None = None
    """Of quantized weights."""
    block: int | None = None
    """Bytes of a block's record, where drafts read some of its full weights (counted in `resident`)."""
    stays: tuple[int, ...] = ()
    """Blocks that drafts run at full precision: they must not travel."""


def steady(alpha: float) -> tuple[float, ...]:
    """`Drafter.held` where each token holds with the same probability, given those before it."""
    return tuple(accumulate(repeat(alpha, DEPTHS[-1]), lambda held, each: held * each))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where each block lives, how far drafts go, and what that gives."""

    num_blocks: int
    block: int
    """Bytes of a record."""
    from_host: tuple[int, ...]
    """Blocks that travel from the host's memory to the device."""
    from_disk: tuple[int, ...]
    """Blocks that travel from the disk."""
    slots: int
    """Records that the device has room for, for blocks that travel."""
    host_slots: int
    """The same in the host's memory, where blocks travel through it."""
    drafter: str
    """Name of the drafter; NAIVE for none."""
    bits: int | None
    """Of the drafter's weights."""
    depth: int
    """Tokens to draft at most, of a tree: levels; 0 = none."""
    nodes: int
    """Of a draft tree; 0: drafts are chains."""
    device_bytes: int
    """Memory taken on the device."""
    host_bytes: int
    """Memory taken of the host, where it is another."""
    transfer_s: float
    """Seconds that the bytes of a pass travel."""
    held: tuple[float, ...]
    """`Drafter.held` of drafts of this depth."""
    round_s: float
    """Seconds of a round, predicted."""
    tokens_per_second: float
    """Predicted, of long answers."""
    naive_tokens_per_second: float
    """Predicted for plain decoding under the same limits, with all memory for blocks."""
    reasons: tuple[Reason, ...]

    @property
    def travelling(self) -> tuple[int, ...]:
        """All blocks that travel, in order."""
        return tuple(sorted((*self.from_host, *self.from_disk)))

    @property
    def resident(self) -> tuple[int, ...]:
        """Blocks that stay on the device, in order."""
        travelling = set(self.travelling)
        return tuple(block for block in range(self.num_blocks) if block not in travelling)

    @property
    def offloads(self) -> bool:
        """Whether anything travels."""
        return bool(self.from_host or self.from_disk)

    def speed_of(self, lengths: Sequence[int]) -> float:
        """Tokens a second predicted of answers that have so many behind the first: the last round of each seldom has
        room for all that it confirms. `tokens_per_second` where there are none.
        """
        rounds = sum(_num_rounds(self.held, length) for length in lengths)
        return sum(lengths) / (rounds * self.round_s) if rounds else self.tokens_per_second


class Reason(NamedTuple):
    """A line of the plan."""

    what: str
    choice: str
    why: str


class DoesNotFit(ValueError):
    """No plan keeps the limits; the message names the smallest that would do."""


def make_plan(sizes: Sizes, limits: Limits, rates: Rates, drafters: Sequence[Drafter], most_depth: int = 64) -> Plan:
    """The fastest plan with one of these drafters (none: plain decoding) that keeps the limits, drafting `most_depth`
    tokens at most. Raises DoesNotFit.
    """
    plain = _Case(sizes, limits, rates, _NO_DRAFTER)
    cases = [_Case(sizes, limits, rates, drafter) for drafter in drafters] or [plain]
    problems = {case.drafter.name: problem for case in cases if (problem := case.problem())}
    fitting = [case for case in cases if case.drafter.name not in problems]
    if not fitting:
        needs = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise DoesNotFit(f"the model does not fit, even with all blocks travelling ({needs}); give that, or less to do")
    best = max(fitting, key=lambda case: case.fastest(most_depth)[0])
    speed, depth = best.fastest(most_depth)
    naive = plain.fastest(0)[0]
    travelling = best.travelling_blocks()
    from_host = set(_spread(travelling, best.num_from_host))
    return Plan(
        num_blocks=sizes.num_blocks,
        block=best.block,
        from_host=tuple(block for block in travelling if block in from_host),
        from_disk=tuple(block for block in travelling if block not in from_host),
        slots=best.slots,
        host_slots=best.host_slots,
        drafter=best.drafter.name,
        bits=best.drafter.bits,
        depth=depth,
        nodes=best.drafter.nodes if depth else 0,
        device_bytes=best.device_bytes,
        host_bytes=best.host_bytes,
        transfer_s=best.transfer() if travelling else 0.0,
        held=best.drafter.held[:depth],
        round_s=best.round_time(depth),
        tokens_per_second=speed,
        naive_tokens_per_second=naive,
        reasons=tuple(_reasons(best, fitting, problems, depth, most_depth, naive)),
    )


class _Case:
    """What one drafter leaves of memory, and what that makes of a pass."""

    def __init__(self, sizes: Sizes, limits: Limits, rates: Rates, drafter: Drafter) -> None:
        self.sizes, self.limits, self.rates, self.drafter = sizes, limits, rates, drafter
        self.block = sizes.block if drafter.block is None else drafter.block
        self.fixed = sizes.fixed + drafter.resident
        room, num = limits.device - self.fixed, sizes.num_blocks
        fits = room >= num * self.block
        self.slots = 0 if fits else max(2, min(num // 4, 1 + math.ceil(IN_FLIGHT / self.block)))
        self.num_resident = num if fits else max(0, math.floor(room / self.block) - self.slots)
        self.num_travelling = num - self.num_resident
        self.num_from_host = self.host_slots = 0
        if limits.host is not None and not fits:
            records = max(0, math.floor((limits.host - sizes.host) / self.block))
            self.host_slots = 0 if records >= self.num_travelling else min(self.slots, records)
            self.num_from_host = min(self.num_travelling, records - self.host_slots)
        self.num_from_disk = self.num_travelling - self.num_from_host

    @property
    def device_bytes(self) -> int:
        return self.fixed + (self.num_resident + self.slots) * self.block

    @property
    def host_bytes(self) -> int:
        return 0 if self.limits.host is None else self.sizes.host + (self.num_from_host + self.host_slots) * self.block

    def problem(self) -> str | None:
        """What the limits lack for this drafter, with the smallest value that would do."""
        least = self.fixed + (self.slots + len(self.drafter.stays)) * self.block
        name = "cpu" if self.limits.host is None else "gpu"
        if self.slots and self.limits.device < least:
            return f"--{name}-memory-limit of at least {show_bytes(least, round_up=True)}"
        disk = self.limits.disk
        least = self.sizes.host + (2 if disk is not None else self.num_travelling) * self.block
        if self.limits.host is not None and self.num_from_disk and self.limits.host < least:
            return f"--cpu-memory-limit of at least {show_bytes(least, round_up=True)}"
        least = self.sizes.num_blocks * self.block
        if self.num_from_disk and disk is not None and disk < least:
            return f"--offload-dir on a disk with {show_bytes(least, round_up=True)} free"
        return None

    def travelling_blocks(self) -> list[int]:
        """Which blocks travel: spread evenly, so that resident ones are computed while the next are on their way."""
        stays = set(self.drafter.stays)
        return _spread([block for block in range(self.sizes.num_blocks) if block not in stays], self.num_travelling)

    def transfer(self) -> float:
        """Seconds until all that travels has arrived."""
        disk = self.num_from_disk * self.block / self.rates.disk
        return disk if self.limits.host is None else max(disk, self.num_travelling * self.block / self.rates.link)

    def pass_time(self, rows: int) -> float:
        """Seconds of a step of so many rows."""
        block = _at(self.rates.block, rows)
        travelling = max(self.transfer(), self.num_travelling * block)
        return travelling + self.num_resident * block + _at(self.rates.rest, rows)

    def speed(self, depth: int) -> float:
        """Tokens a second with drafts of this length."""
        return (1 + sum(self.drafter.held[:depth])) / self.round_time(depth)

    def round_time(self, depth: int) -> float:
        """Seconds of a round with drafts of this length."""
        return depth * self.drafter.step + self.pass_time(self.rows(depth))

    def rows(self, depth: int) -> int:
        """Of the step that verifies a draft of this depth."""
        return 1 + (self.drafter.nodes if depth and self.drafter.nodes else depth)

    def fastest(self, most_depth: int) -> tuple[float, int]:
        """Tokens a second, and the depth of drafts that gives them."""
        most = min(most_depth, self.drafter.nodes // 2) if self.drafter.nodes else most_depth  # trees are not that thin
        ladder = [depth for depth in DEPTHS if depth <= most] if self.drafter.held else []
        return max((self.speed(depth), depth) for depth in (0, *ladder))


_NO_DRAFTER = Drafter(name=NAIVE, resident=0, step=0.0, held=())


def _num_rounds(held: Sequence[float], tokens: int) -> float:
    """Rounds on average until there are so many tokens, if the first 1, 2, ... of a draft hold with these odds."""
    ends = [before - after for before, after in pairwise((1.0, *held, 0.0))]  # of drafts of which just so many hold
    rounds = [0.0]
    for left in range(1, tokens + 1):
        rounds.append(1 + sum(end * rounds[max(0, left - kept)] for kept, end in enumerate(ends, 1)))
    return rounds[tokens]


def _spread(blocks: Sequence[int], num: int) -> list[int]:
    """So many of them, evenly."""
    return [blocks[(2 * i + 1) * len(blocks) // (2 * num)] for i in range(num)]


def _at(measured: Mapping[int, float], rows: int) -> float:
    """The line through the neighbouring measurements, at so many rows."""
    known = sorted(measured)
    if len(known) == 1 or rows <= known[0]:
        return measured[known[0]]
    i = min(bisect_right(known, rows), len(known) - 1)
    low, high = known[i - 1], known[i]
    return measured[low] + (measured[high] - measured[low]) * (rows - low) / (high - low)


def _reasons(
    best: _Case, fitting: list[_Case], problems: Mapping[str, str], depth: int, most_depth: int, naive: float
) -> Iterator[Reason]:
    sizes, limits, rates, num = best.sizes, best.limits, best.rates, best.sizes.num_blocks
    device = "host" if limits.host is None else "device"
    drafts = f", {show_bytes(best.drafter.resident)} drafts" if best.drafter.resident else ""
    slots = f", {show_bytes(best.slots * best.block)} slots" if best.slots else ""
    yield Reason(
        f"{device} memory",
        f"{show_bytes(best.device_bytes)} of {show_bytes(limits.device)}",
        f"{show_bytes(sizes.fixed)} embedding, head, KV and the like{drafts}{slots}",
    )
    yield Reason(
        "resident",
        f"{best.num_resident} of {num} blocks",
        f"{show_bytes(best.num_resident * best.block)}: what the limit leaves",
    )
    for where, number, rate in (("host", best.num_from_host, rates.link), ("disk", best.num_from_disk, rates.disk)):
        if number:
            yield Reason(
                f"from {where}",
                f"{number} of {num} blocks",
                f"{show_bytes(number * best.block)} at {show_bytes(rate)}/s: {number * best.block / rate:.3g} s a pass",
            )
    if best.slots:
        yield Reason("slots", str(best.slots), f"{show_bytes(best.block)} each: filled ahead while others are computed")
    others = [f"{c.drafter.name} {c.fastest(most_depth)[0]:.3g} tok/s" for c in fitting if c is not best]
    others += [f"{name} needs {problem}" for name, problem in problems.items()]
    if best.drafter.held:
        known = "assumed" + (f", and {best.drafter.seen:,} seen" if best.drafter.seen else "")
        what = "level" if best.drafter.nodes else "token"
        expected = f"a {what} holds in {best.drafter.held[0]:.1%} ({known}), takes {best.drafter.step * 1e3:.3g} ms"
        yield Reason("drafts", best.drafter.name, "; ".join([expected, *others]))
        rows = best.rows(depth)
        took = f"a pass takes {best.pass_time(1):.3g} s with 1 row, {best.pass_time(rows):.3g} s with {rows}"
        shape = f"{depth}, trees of {best.drafter.nodes}" if best.drafter.nodes and depth else str(depth)
        yield Reason("depth", shape, took)
    ratio = f"{best.fastest(most_depth)[0] / naive:.2g} times plain decoding under the same limits ({naive:.3g} tok/s)"
    yield Reason("predicted", f"{best.fastest(most_depth)[0]:.3g} tok/s", ratio if depth else "plain decoding")


_UNITS: tuple[tuple[str, float], ...] = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def show_bytes(number: float, *, round_up: bool = False) -> str:
    """Three digits at most, in units of powers of ten; rounded up where it is to be given as a limit."""
    if number == math.inf:
        return "no limit"
    name, unit = next(((name, unit) for name, unit in _UNITS if number >= unit), ("bytes", 1.0))
    value = number / unit
    digits = 0 if value >= 100 or unit == 1.0 else 1 if value >= 10 else 2
    shown: Callable[[float], float] = math.ceil if round_up else round
    return f"{shown(value * 10**digits) / 10**digits:g} {name}"
