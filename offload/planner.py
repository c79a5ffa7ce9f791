"""Offload plan: a pure function of sizes, limits and measured rates.

The time of a pass is the maximum of the transfer time and the compute time of offloaded blocks, plus the compute time
of resident blocks. With most blocks offloaded, a step of many rows takes about as long as a step of one row, so the
speed depends on the tokens accepted per pass. A drafter's memory reduces the number of resident blocks. Transfers
during drafting are not modelled: they would gain a few per cent.

Memory has up to three tiers: device, host memory connected by a link, disk. On a CPU the first two are one. Units:
bytes, seconds, bytes per second.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

from offload.plan import DEPTHS, NAIVE, Drafter, Limits, Plan, Rates, Reason, Sizes

IN_FLIGHT = 16 * 2**20
"""Bytes prefetched, so that the link is not idle between small blocks.

The slots hold at most a quarter of the blocks, or two.
"""


class DoesNotFit(ValueError):
    """No plan within the limits; the message names the smallest sufficient limits."""


def make_plan(sizes: Sizes, limits: Limits, rates: Rates, drafters: Sequence[Drafter], max_depth: int = 64) -> Plan:
    """Return the plan with the highest predicted speed within the limits.

    The plan has one of the drafters, and drafts of at most `max_depth` tokens. Raises DoesNotFit if no plan fits.
    """
    plain = _Case(sizes, limits, rates, _NO_DRAFTER)
    cases = [_Case(sizes, limits, rates, drafter) for drafter in drafters] or [plain]
    problems = {case.drafter.name: problem for case in cases if (problem := case.problem())}
    fitting = [case for case in cases if case.drafter.name not in problems]
    if not fitting:
        needs = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise DoesNotFit(
            f"the model does not fit, even with all blocks offloaded ({needs}); raise that limit, or lower --max-batch"
        )
    best = max(fitting, key=lambda case: case.fastest(max_depth)[0])
    speed, depth = best.fastest(max_depth)
    naive = plain.fastest(0)[0]
    offloaded = best.offloaded_blocks()
    from_host = set(_spread(offloaded, best.num_from_host))
    return Plan(
        num_blocks=sizes.num_blocks,
        block=best.block,
        from_host=tuple(block for block in offloaded if block in from_host),
        from_disk=tuple(block for block in offloaded if block not in from_host),
        slots=best.slots,
        host_slots=best.host_slots,
        drafter=best.drafter.name,
        bits=best.drafter.bits,
        depth=depth,
        nodes=best.drafter.nodes if depth else 0,
        device_bytes=best.device_bytes,
        host_bytes=best.host_bytes,
        transfer_s=best.transfer() if offloaded else 0.0,
        cumulative_acceptance=best.drafter.cumulative_acceptance[:depth],
        round_s=best.round_time(depth),
        tokens_per_second=speed,
        naive_tokens_per_second=naive,
        reasons=tuple(_reasons(best, fitting, problems, depth, max_depth, naive)),
    )


class _Case:
    """Memory and times of a pass with one drafter."""

    def __init__(self, sizes: Sizes, limits: Limits, rates: Rates, drafter: Drafter) -> None:
        self.sizes, self.limits, self.rates, self.drafter = sizes, limits, rates, drafter
        self.block = sizes.block if drafter.block is None else drafter.block
        self.fixed = sizes.fixed + drafter.resident
        room, num = limits.device - self.fixed, sizes.num_blocks
        fits = room >= num * self.block
        self.slots = 0 if fits else max(2, min(num // 4, 1 + math.ceil(IN_FLIGHT / self.block)))
        self.num_resident = num if fits else max(0, math.floor(room / self.block) - self.slots)
        self.num_offloaded = num - self.num_resident
        self.num_from_host = self.host_slots = 0
        if limits.host is not None and not fits:
            records = max(0, math.floor((limits.host - sizes.host) / self.block))
            self.host_slots = 0 if records >= self.num_offloaded else min(self.slots, records)
            self.num_from_host = min(self.num_offloaded, records - self.host_slots)
        self.num_from_disk = self.num_offloaded - self.num_from_host

    @property
    def device_bytes(self) -> int:
        return self.fixed + (self.num_resident + self.slots) * self.block

    @property
    def host_bytes(self) -> int:
        return 0 if self.limits.host is None else self.sizes.host + (self.num_from_host + self.host_slots) * self.block

    def problem(self) -> str | None:
        """Return the first limit that is too low, with its minimum.

        Returns None if all limits suffice.
        """
        needed = self.fixed + (self.slots + len(self.drafter.resident_blocks)) * self.block
        name = "cpu" if self.limits.host is None else "gpu"
        if self.slots and self.limits.device < needed:
            return f"--{name}-memory-limit of at least {show_bytes(needed, round_up=True)}"
        disk = self.limits.disk
        needed = self.sizes.host + (2 if disk is not None else self.num_offloaded) * self.block
        if self.limits.host is not None and self.num_from_disk and self.limits.host < needed:
            return f"--cpu-memory-limit of at least {show_bytes(needed, round_up=True)}"
        needed = self.sizes.num_blocks * self.block
        if self.num_from_disk and disk is not None and disk < needed:
            return f"--offload-dir on a disk with {show_bytes(needed, round_up=True)} free"
        return None

    def offloaded_blocks(self) -> list[int]:
        """Return the offloaded blocks, evenly spread.

        Transfers then overlap with the computation of resident blocks.
        """
        resident_blocks = set(self.drafter.resident_blocks)
        return _spread(
            [block for block in range(self.sizes.num_blocks) if block not in resident_blocks], self.num_offloaded
        )

    def transfer(self) -> float:
        """Return the seconds of transfers per pass."""
        disk = self.num_from_disk * self.block / self.rates.disk
        return disk if self.limits.host is None else max(disk, self.num_offloaded * self.block / self.rates.link)

    def pass_time(self, rows: int) -> float:
        """Return the seconds of a step with `rows` rows."""
        block = _at(self.rates.block, rows)
        offloaded = max(self.transfer(), self.num_offloaded * block)
        return offloaded + self.num_resident * block + _at(self.rates.rest, rows)

    def speed(self, depth: int) -> float:
        """Return the predicted tokens per second with drafts of this depth."""
        return (1 + sum(self.drafter.cumulative_acceptance[:depth])) / self.round_time(depth)

    def round_time(self, depth: int) -> float:
        """Return the predicted seconds of a round with drafts of this depth."""
        return depth * self.drafter.step + self.pass_time(self.rows(depth))

    def rows(self, depth: int) -> int:
        """Return the rows of the step that verifies a draft."""
        return 1 + (self.drafter.nodes if depth and self.drafter.nodes else depth)

    def fastest(self, max_depth: int) -> tuple[float, int]:
        """Return the highest tokens per second and its depth."""
        max_length = (
            min(max_depth, self.drafter.nodes // 2) if self.drafter.nodes else max_depth
        )  # trees are not that thin
        ladder = [depth for depth in DEPTHS if depth <= max_length] if self.drafter.cumulative_acceptance else []
        return max((self.speed(depth), depth) for depth in (0, *ladder))


_NO_DRAFTER = Drafter(name=NAIVE, resident=0, step=0.0, cumulative_acceptance=())


def _spread(blocks: Sequence[int], num: int) -> list[int]:
    """Return `num` evenly spread blocks."""
    return [blocks[(2 * i + 1) * len(blocks) // (2 * num)] for i in range(num)]


def _at(measured: Mapping[int, float], rows: int) -> float:
    """Return the value at `rows`, linearly interpolated.

    Below the smallest measured number of rows it is constant.
    """
    known = sorted(measured)
    if len(known) == 1 or rows <= known[0]:
        return measured[known[0]]
    i = min(bisect_right(known, rows), len(known) - 1)
    low, high = known[i - 1], known[i]
    return measured[low] + (measured[high] - measured[low]) * (rows - low) / (high - low)


def _reasons(
    best: _Case, fitting: list[_Case], problems: Mapping[str, str], depth: int, max_depth: int, naive: float
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
    others = [f"{c.drafter.name} {c.fastest(max_depth)[0]:.3g} tok/s" for c in fitting if c is not best]
    others += [f"{name} needs {problem}" for name, problem in problems.items()]
    if best.drafter.cumulative_acceptance:
        known = "assumed" + (f", and {best.drafter.seen:,} seen" if best.drafter.seen else "")
        what = "level" if best.drafter.nodes else "token"
        alpha = best.drafter.cumulative_acceptance[0]
        expected = f"a {what} is accepted in {alpha:.1%} ({known}), takes {best.drafter.step * 1e3:.3g} ms"
        yield Reason("drafts", best.drafter.name, "; ".join([expected, *others]))
        rows = best.rows(depth)
        took = f"a pass takes {best.pass_time(1):.3g} s with 1 row, {best.pass_time(rows):.3g} s with {rows}"
        shape = f"{depth}, trees of {best.drafter.nodes}" if best.drafter.nodes and depth else str(depth)
        yield Reason("depth", shape, took)
    ratio = f"{best.fastest(max_depth)[0] / naive:.2g} times plain decoding under the same limits ({naive:.3g} tok/s)"
    yield Reason("predicted", f"{best.fastest(max_depth)[0]:.3g} tok/s", ratio if depth else "plain decoding")


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
