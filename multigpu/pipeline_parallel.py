"""Pipeline parallelism in one process: stages of blocks on several devices.

It is for models that do not fit on one device. The stages of a step run one after the other: a step takes the time of
one device, plus a transfer per stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive blocks on one device."""

    device: torch.device
    first: int
    num_blocks: int

    @property
    def blocks(self) -> range:
        """Indices of the blocks."""
        return range(self.first, self.first + self.num_blocks)


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Devices of all parts of a model.

    The embedding is on the first stage, the last norm and the head on the last.
    """

    stages: tuple[Stage, ...]
    caller_device: torch.device | None = None
    """Device of tokens and logits, if that is not the last stage's."""
    simulated_latency_s: float = 0.0
    """Simulated latency of each transfer between stages, in seconds."""

    @classmethod
    def of(
        cls, devices: Sequence[torch.device], num_blocks: Sequence[int], simulated_latency_s: float = 0.0
    ) -> PipelinePlan:
        """Return the plan with these devices and numbers of blocks."""
        ends = accumulate(num_blocks, initial=0)
        parts = zip(devices, pairwise(ends), strict=True)
        return cls(
            tuple(Stage(device, first, end - first) for device, (first, end) in parts),
            simulated_latency_s=simulated_latency_s,
        )

    @property
    def output_device(self) -> torch.device:
        """Device of tokens and lengths: the last stage's, unless another is given."""
        return self.caller_device or self.stages[-1].device

    @property
    def crosses_devices(self) -> bool:
        """True if a step has transfers between devices or stages."""
        return len(self.stages) > 1 or self.caller_device is not None

    def device_of(self, block: int) -> torch.device:
        """Return the device of a block."""
        return next(stage.device for stage in self.stages if block in stage.blocks)

    def is_output_stage(self, stage: int) -> bool:
        """Return True if tokens are selected on this stage."""
        return self.caller_device is None and stage == len(self.stages) - 1


class StagesDoNotFit(ValueError):
    """No assignment of blocks fits; the message has the closest one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSizes:
    """Bytes on each stage, by part of the model."""

    blocks: tuple[int, ...]
    """Bytes of each block: full-precision and quantized weights, and KV."""
    first: int = 0
    """Bytes of only the first stage: the embedding."""
    last: int = 0
    """Bytes of only the last stage: norm, head, logits, and drafter."""
    extra: Mapping[int, int] | None = None
    """Index of a stage -> further bytes."""

    def of(self, stage: int, num_stages: int, first: int, end: int) -> int:
        """Bytes of a stage with these blocks, from `first` to before `end`."""
        ends = self.first * (stage == 0) + self.last * (stage == num_stages - 1)
        return sum(self.blocks[first:end]) + ends + (self.extra or {}).get(stage, 0)


def balance_blocks(sizes: PipelineSizes, limits: Sequence[float], names: Sequence[str]) -> tuple[int, ...]:
    """Assign blocks to stages in order, balanced, at least one each.

    `limits`: bytes per stage, all finite or all infinite (then balanced evenly). `names`: stages in error messages.
    Raises ValueError if there are more stages than blocks, and DoesNotFit if a stage exceeds its limit.
    """
    num_stages, num_blocks = len(limits), len(sizes.blocks)
    if num_stages > num_blocks:
        raise ValueError(
            f"devices are {', '.join(names)} and the model has {num_blocks} blocks; give at most {num_blocks} devices"
        )
    yard = [1.0 if math.isinf(limit) else max(limit, 1.0) for limit in limits]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # blocks so far -> fullest stage, and the shares
    for stage in range(num_stages):
        left = num_stages - stage - 1
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in range(stage + 1, num_blocks - left + 1) if left else (num_blocks,):
            reached[end] = min(
                (max(full, sizes.of(stage, num_stages, first, end) / yard[stage]), (*parts, end - first))
                for first, (full, parts) in best.items()
                if first < end
            )
        best = reached
    chosen = best[num_blocks][1]
    ends = list(accumulate(chosen, initial=0))
    bytes_of_stages = [sizes.of(stage, num_stages, *ends[stage : stage + 2]) for stage in range(num_stages)]
    if any(num > limit for num, limit in zip(bytes_of_stages, limits, strict=True)):
        plan = "; ".join(
            f"{name} would hold blocks {first} to {end - 1} with {num / 1e9:.2f} GB, and may hold {limit / 1e9:.2f} GB"
            for name, (first, end), num, limit in zip(names, pairwise(ends), bytes_of_stages, limits, strict=True)
        )
        raise StagesDoNotFit(f"the model does not fit: {plan}; give more devices or memory, or a shorter max_context")
    return chosen


def parse_device_map(places: Mapping[str, str | int], num_blocks: int) -> tuple[list[str], tuple[int, ...]]:
    """Return devices and block counts of accelerate's map of modules to devices.

    Raises ValueError for blocks without a device, for stages that are not contiguous, and if embedding or head are not
    on the device of the neighbouring block.
    """

    def place_of(name: str) -> str:
        parts = name.split(".")
        prefixes = [".".join(parts[:num]) for num in range(len(parts), -1, -1)]
        found = next((places[prefix] for prefix in prefixes if prefix in places), None)
        if found is None:
            raise ValueError(f"the device map does not name {name}; it must name all modules")
        return f"cuda:{found}" if isinstance(found, int) or found.isdecimal() else found

    names = [place_of(f"model.layers.{block}") for block in range(num_blocks)]
    devices, counts = [names[0]], [1]
    for name in names[1:]:
        if name == devices[-1]:
            counts[-1] += 1
        elif name in devices:
            raise ValueError(f"the device map comes back to {name}; give each device layers next to each other")
        else:
            devices.append(name)
            counts.append(1)
    for module, device in (("model.embed_tokens", devices[0]), ("model.norm", devices[-1]), ("lm_head", devices[-1])):
        if module == "lm_head" and not any(module.startswith(prefix) for prefix in places):
            continue  # of tied models it is not always named
        if place_of(module) != device:
            raise ValueError(f"the device map has {module} on {place_of(module)}; it belongs to the layers on {device}")
    return devices, tuple(counts)
