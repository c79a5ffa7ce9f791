"""Stages of a pipeline: which blocks each device has, and the moves between them."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.block_ranges import BlockRange
from multigpu.pipeline_parallel import PipelinePlan, PipelineSizes, parse_device_map
from multigpu.pipeline_parallel import balance_blocks as share_blocks
from sharesd.config import EngineConfig, Mode
from sharesd.devices.selection import device_of
from sharesd.devices.transfer import copy_to_device
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import Need
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.checkpoint import weight_files
from sharesd.models.decoder import Decoder
from sharesd.models.hub import resolve
from sharesd.models.loader import decoder_config
from sharesd.models.weight_mapping import EMBEDDING, HEAD, LAYERS
from sharesd.weights.offload_planner import LEFT_FREE
from sharesd.weights.sizes import (
    WIDEST_STEP,
    TensorOutline,
    expanded_bytes,
    kv_bytes,
    kv_slots,
    outline_of,
    quantized_bytes,
    quantizer_for,
)

log = logging.getLogger(__name__)


def plan_pipeline(config: EngineConfig, modes: Sequence[Mode], folder: Path, dtype: torch.dtype) -> PipelinePlan:
    """Plan the given stages; ValueError for missing devices, small limits."""
    wanted = config.split
    shape = decoder_config(folder)
    if wanted.device_map not in (None, "auto"):
        names, num_blocks = parse_device_map(_read_map(Path(str(wanted.device_map))), shape.num_hidden_layers)
        devices = _devices(names)
    else:
        devices = _devices(wanted.devices or _all_gpus(config))
        names = [str(device) for device in devices]
        decoder = Decoder(shape, dtype=dtype, device="meta")
        num_blocks = share_blocks(
            _sizes(decoder, outline_of(folder), config, modes, devices), _limits(config, devices), names
        )
    split = PipelinePlan.of(devices, num_blocks, wanted.simulated_latency_s)
    for stage in split.stages:
        log.info("stage on %s: blocks %d to %d", stage.device, stage.first, stage.blocks[-1])
    return split


def _devices(names: Sequence[str]) -> list[torch.device]:
    devices = [device_of(name) for name in names]
    if len({device.type for device in devices}) > 1:
        raise ValueError(f"devices are {', '.join(names)}; give GPUs, or the CPU several times, not both")
    return devices


def _all_gpus(config: EngineConfig) -> list[str]:
    found = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if not found:
        raise ValueError("--devices auto found no GPU; list the devices")
    given = [f"cuda:{number}" for number, _ in sorted(config.split.max_memory)]
    return given or found


def _read_map(file: Path) -> dict[str, str | int]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"device_map {str(file)!r} is neither `auto` nor a file of JSON: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(place, (str, int)) for place in found.values()):
        raise ValueError(f"{file} is not a device map; it must name modules and their devices")
    return found


def _limits(config: EngineConfig, devices: Sequence[torch.device]) -> list[float]:
    given, on_cpu = dict(config.split.max_memory), devices[0].type == "cpu"
    if on_cpu and not given:
        return [math.inf] * len(devices)  # all of them have the host's memory
    numbers = [number if on_cpu else device.index for number, device in enumerate(devices)]
    unknown = [number for number in given if number not in numbers]
    if unknown or (on_cpu and len(given) < len(devices)):
        names = ", ".join(map(str, devices))
        raise ValueError(
            f"max_memory names {', '.join(map(str, sorted(given)))} and the devices are {names}; name "
            + ("each stage, from 0" if on_cpu else "GPUs among them")
        )
    limits = [
        float(given[number]) if number in given else (1 - LEFT_FREE) * torch.cuda.mem_get_info(device)[0]
        for number, device in zip(numbers, devices, strict=True)
    ]
    times = Counter(numbers)
    return [limit / times[number] for number, limit in zip(numbers, limits, strict=True)]


def _sizes(
    decoder: Decoder,
    outline: Mapping[str, TensorOutline],
    config: EngineConfig,
    modes: Sequence[Mode],
    devices: Sequence[torch.device],
) -> PipelineSizes:
    drafters = selection.active_drafters(config, *modes)
    balance_blocks = bool(registry.those(drafters, Need.QUANTIZED_TARGET))
    has_second = bool(registry.those(drafters, Need.SECOND_MODEL))
    c, dtype = decoder.config, decoder.embed.weight.dtype
    blocks, rest = [0] * len(decoder.blocks), {}
    for name, tensor in outline.items():
        size = tensor.nbytes(dtype, devices[0])
        if name.startswith(LAYERS):
            blocks[int(name.removeprefix(LAYERS).partition(".")[0])] += size
        else:
            rest[name] = size
    embedding = rest[EMBEDDING]
    context, on_gpu = min(config.planned_context, decoder.max_context), devices[0].type == "cuda"
    width = max(WIDEST_STEP, 1 + config.max_draft_tokens)
    tree = config.explicit_tree[:2] if config.explicit_tree is not None else (0, 0)
    slots = kv_slots(context, width, tree=tree, ahead=on_gpu, pads=True)
    kv, numbers = kv_bytes(decoder, config, slots), expanded_bytes(decoder, config, slots, on_gpu=on_gpu)
    blocks = [weights + own for weights, own in zip(blocks, kv, strict=True)]
    head = rest.get(HEAD, embedding)
    tables = sum(buffer.nbytes for buffer in decoder.buffers())
    logits = config.max_batch * (1 + config.max_draft_tokens) * c.vocab_size * (2 * dtype.itemsize + 3 * 4)
    last, copied, extra = head + tables + logits, 0, dict.fromkeys(range(len(devices)), tables + numbers)
    second = selection.second_model(config) if has_second else None
    if balance_blocks or (has_second and second is None):
        for task in quantizer_for(decoder, config.quant).tasks:
            size = quantized_bytes(decoder, task, config.quant)
            copied += size
            if balance_blocks and task.layer is None:
                last += size
            elif balance_blocks:
                blocks[task.layer or 0] += size
    if has_second:
        drafts = copied + sum(kv) + embedding if second is None else _size_of(second, config)
        place = devices[-1] if config.draft_device is None else device_of(config.draft_device)
        if place in devices:  # of stages that share it, the last one
            extra[len(devices) - 1 - devices[::-1].index(place)] += drafts
    last += sum(_size_of(head, config) for head in config.heads)
    return PipelineSizes(blocks=tuple(blocks), first=embedding, last=last, extra=extra)


def _size_of(name: str, config: EngineConfig) -> int:
    return sum(
        file.stat().st_size
        for file in weight_files(resolve(name, ignored=config.ignore_keys, trust_remote_code=config.trust_remote_code))
    )


class StagedBlocks:
    """Block ranges of a decoder in stages."""

    def __init__(self, split: PipelinePlan) -> None:
        self._split = split
        self._ranges = tuple(
            BlockRange(stage.first, stage.num_blocks, move_inputs=partial(self._move_inputs, number))
            for number, stage in enumerate(split.stages)
        )

    def ranges(self) -> Sequence[BlockRange]:
        return self._ranges

    def _move_inputs(
        self, number: int, x_BTD: Tensor, cache: StaticKVCache, tree_mask: TreeAttentionMask | None
    ) -> tuple[Tensor, StaticKVCache, TreeAttentionMask | None]:
        split, device = self._split, self._split.stages[number].device
        seconds = split.simulated_latency_s if number else 0.0
        sent = [x_BTD] if number else []  # to the first stage tokens came
        if split.is_output_stage(number):
            copies = copy_to_device(device, *sent, seconds=seconds)
        else:
            view = cache.on_stage(number)
            lengths = [(view.lengths, cache.lengths)] if cache.known_length is None else []
            copies = copy_to_device(device, *(tree_mask or ()), *sent, onto=lengths, seconds=seconds)
            if cache.known_length is not None:
                view.lengths.fill_(cache.known_length)
            cache, tree_mask = view, tree_mask and TreeAttentionMask(*copies[:2])
        return copies[-1] if sent else x_BTD, cache, tree_mask
