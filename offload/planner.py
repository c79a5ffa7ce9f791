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
from collections.abc import Iterable, Iterator, Mapping, Sequence

from offload.plan import DEPTHS, NAIVE, DoesNotFit, Limits, Plan, PlannedDrafter, Rates, Reason, Sizes, show_bytes

IN_FLIGHT = 16 * 2**20
"""Bytes prefetched, so that the link is not idle between small blocks.

The slots hold at most a quarter of the blocks, or two.
"""


def make_plan(
    sizes: Sizes, limits: Limits, rates: Rates, drafters: Sequence[PlannedDrafter], max_depth: int = 64
) -> Plan:
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
    return Plan(
        blocks=best.blocks,
        from_host=best.from_host,
        from_disk=best.from_disk,
        slots=best.slots,
        host_slots=best.host_slots,
        drafter=best.drafter.name,
        bits=best.drafter.bits,
        depth=depth,
        nodes=best.drafter.nodes if depth else 0,
        device_bytes=best.device_bytes,
        host_bytes=best.host_bytes,
        transfer_s=best.transfer() if best.offloaded else 0.0,
        cumulative_acceptance=best.drafter.cumulative_acceptance[:depth],
        round_s=best.round_time(depth),
        tokens_per_second=speed,
        naive_tokens_per_second=naive,
        reasons=tuple(_reasons(best, fitting, problems, depth, max_depth, naive)),
    )


class _Case:
    """Memory and times of a pass with one drafter."""

    def __init__(self, sizes: Sizes, limits: Limits, rates: Rates, drafter: PlannedDrafter) -> None:
        self.sizes, self.limits, self.rates, self.drafter = sizes, limits, rates, drafter
        self.blocks = sizes.blocks if drafter.blocks is None else drafter.blocks
        self.slot, self.fixed = max(self.blocks), sizes.fixed + drafter.resident
        room, num = limits.device - self.fixed, len(self.blocks)
        fits = room >= sum(self.blocks)
        self.slots = 0 if fits else max(2, min(num // 4, 1 + math.ceil(IN_FLIGHT / self.slot)))
        self.offloaded = () if fits else self._fewest_offloaded(room - self.slots * self.slot)
        self.from_host: tuple[int, ...] = ()
        self.host_slots = 0
        if limits.host is not None:
            room = limits.host - sizes.host
            self.host_slots = 0 if self.bytes_of(self.offloaded) <= room else self._host_slots(room)
            self.from_host = self._choose_from_host(room - self.host_slots * self.slot)
        from_host = set(self.from_host)
        self.from_disk = tuple(block for block in self.offloaded if block not in from_host)

    def _fewest_offloaded(self, room: float) -> tuple[int, ...]:
        """Return the fewest blocks without which the others have room.

        They are evenly spread: transfers overlap with the computation of resident blocks.
        """
        kept, total = set(self.drafter.resident_blocks), sum(self.blocks)
        blocks = [block for block in range(len(self.blocks)) if block not in kept]
        spreads = (_spread(blocks, number) for number in range(len(blocks)))
        return next((each for each in spreads if total - self.bytes_of(each) <= room), tuple(blocks))

    def _host_slots(self, room: float) -> int:
        return min(self.slots, max(0, math.floor(room / self.slot)))

    def _choose_from_host(self, room: float) -> tuple[int, ...]:
        """Return as many offloaded blocks as host memory has room for."""
        spreads = (_spread(self.offloaded, number) for number in range(len(self.offloaded), 0, -1))
        return next((each for each in spreads if self.bytes_of(each) <= room), ())

    def bytes_of(self, blocks: Iterable[int]) -> int:
        """Return the bytes of some blocks' records."""
        return sum(self.blocks[block] for block in blocks)

    @property
    def num_resident(self) -> int:
        return len(self.blocks) - len(self.offloaded)

    @property
    def resident_bytes(self) -> int:
        return sum(self.blocks) - self.bytes_of(self.offloaded)

    @property
    def device_bytes(self) -> int:
        return self.fixed + self.resident_bytes + self.slots * self.slot

    @property
    def host_bytes(self) -> int:
        if self.limits.host is None:
            return 0
        return self.sizes.host + self.bytes_of(self.from_host) + self.host_slots * self.slot

    def problem(self) -> str | None:
        """Return the first limit that is too low, with its minimum.

        Returns None if all limits suffice.
        """
        needed = self.fixed + self.slots * self.slot + self.bytes_of(self.drafter.resident_blocks)
        name = "cpu" if self.limits.host is None else "gpu"
        if self.slots and self.limits.device < needed:
            return f"--{name}-memory-limit of at least {show_bytes(needed, round_up=True)}"
        disk = self.limits.disk
        needed = self.sizes.host + (2 * self.slot if disk is not None else self.bytes_of(self.offloaded))
        if self.limits.host is not None and self.from_disk and self.limits.host < needed:
            return f"--cpu-memory-limit of at least {show_bytes(needed, round_up=True)}"
        needed = sum(self.blocks)
        if self.from_disk and disk is not None and disk < needed:
            return f"--offload-dir on a disk with {show_bytes(needed, round_up=True)} free"
        return None

    def transfer(self) -> float:
        """Return the seconds of transfers per pass."""
        disk = self.bytes_of(self.from_disk) / self.rates.disk
        return disk if self.limits.host is None else max(disk, self.bytes_of(self.offloaded) / self.rates.link)

    def pass_time(self, rows: int) -> float:
        """Return the seconds of a step with `rows` rows."""
        block = _at(self.rates.block, rows)
        offloaded = max(self.transfer(), len(self.offloaded) * block)
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


_NO_DRAFTER = PlannedDrafter(name=NAIVE, resident=0, step=0.0, cumulative_acceptance=())


def _spread(blocks: Sequence[int], num: int) -> tuple[int, ...]:
    """Return `num` evenly spread blocks."""
    return tuple(blocks[(2 * i + 1) * len(blocks) // (2 * num)] for i in range(num))


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
    sizes, limits, rates, num = best.sizes, best.limits, best.rates, len(best.blocks)
    device = "host" if limits.host is None else "device"
    drafts = f", {show_bytes(best.drafter.resident)} drafts" if best.drafter.resident else ""
    slots = f", {show_bytes(best.slots * best.slot)} slots" if best.slots else ""
    yield Reason(
        f"{device} memory",
        f"{show_bytes(best.device_bytes)} of {show_bytes(limits.device)}",
        f"{show_bytes(sizes.fixed)} embedding, head, KV and the like{drafts}{slots}",
    )
    yield Reason(
        "resident",
        f"{best.num_resident} of {num} blocks",
        f"{show_bytes(best.resident_bytes)}: what the limit leaves",
    )
    for where, blocks, rate in (("host", best.from_host, rates.link), ("disk", best.from_disk, rates.disk)):
        if blocks:
            size = best.bytes_of(blocks)
            yield Reason(
                f"from {where}",
                f"{len(blocks)} of {num} blocks",
                f"{show_bytes(size)} at {show_bytes(rate)}/s: {size / rate:.3g} s a pass",
            )
    if best.slots:
        yield Reason("slots", str(best.slots), f"{show_bytes(best.slot)} each: filled ahead while others are computed")
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
