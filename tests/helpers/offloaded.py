"""What tests of offloading share: plans and limits, texts of all modes; any blocks of a decoder that was loaded as a
whole, moved to a file from which they come back, without a planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compile.linear import PackedLinear
from offload.block_layout import RecordLayout, fill
from offload.disk_reader import DiskLink
from offload.prefetcher import Prefetcher
from offload.transfer import Link, Throttled, host_slots
from quant.switch_linear import SwitchLinear
from sharesd.config import EngineConfig, Mode
from sharesd.models.decoder import Decoder
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.weights.offload_planner import Offloading, plan_for
from tests.helpers.in_mode import in_mode

LINEARS = ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")
LAYERS = 8
"""Of the models that plans are made for."""
PROMPTS: list[str | list[int]] = ["the cat sat on the mat and the cat sat on the", [7, 9], [5, 6, 7] * 20]
WAYS = tuple(SamplingParams(max_new_tokens=10, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 1.0))


def texts(runtime: Runtime, modes: tuple[Mode, ...]) -> dict[tuple[str, float], list[list[int]]]:
    """By mode and temperature, the tokens of the answers to `PROMPTS`."""
    return {
        (mode, way.temperature): [done.token_ids for done in in_mode(runtime, mode, warm=way).generate(PROMPTS, way)]
        for mode, way in product(modes, WAYS)
    }


def planned(config: EngineConfig, *modes: Mode) -> Offloading:
    found = plan_for(config, modes or (config.mode,))
    assert found is not None
    return found


def limit_leaving(num_resident: int, config: EngineConfig, *modes: Mode) -> int:
    """The limit that leaves so many of `LAYERS` blocks in memory; with that of the config all of them stay."""
    plan = planned(config, *modes).plan
    assert not plan.offloads
    return plan.device_bytes - (LAYERS - num_resident - 2) * plan.slot


def packed_weights(block: nn.Module) -> dict[str, Tensor]:
    """What may travel of a block on the CPU, with names in the block: weights of its packed linears at full precision,
    but for those which have no quantized weights while others have.
    """
    parts = dict(block.named_modules())
    switched: dict[str, Any] = {name: part.full for name, part in parts.items() if isinstance(part, SwitchLinear)}
    linears = switched or {name: part for name, part in parts.items() if isinstance(part, PackedLinear)}
    return {f"{name}.weight": linear.weight for name, linear in linears.items()}


def spill(
    decoder: Decoder,
    blocks: Sequence[int],
    path: Path,
    *,
    num_slots: int = 2,
    bytes_per_second: float | None = None,
    direct: bool | None = None,
) -> tuple[Prefetcher, dict[int, RecordLayout]]:
    """Write `packed_weights` of some blocks into a file; returns how they come back, and what a record holds.

    ValueError where these blocks do not have the same.
    """
    layout = RecordLayout.of(packed_weights(decoder.blocks[blocks[0]]))
    record = torch.empty(layout.record_bytes, dtype=torch.uint8)
    with path.open("wb") as file:
        for block in blocks:
            weights = packed_weights(decoder.blocks[block])
            if RecordLayout.of(weights) != layout:
                raise ValueError(f"block {block} has other weights than block {blocks[0]}; let it stay")
            fill(record, layout, weights)
            file.write(record.numpy().data)
    link: Link = DiskLink(path, {block: i * layout.record_bytes for i, block in enumerate(blocks)}, direct=direct)
    if bytes_per_second is not None:
        link = Throttled(link, bytes_per_second)
    return Prefetcher(blocks, host_slots(layout.record_bytes, num_slots), link), dict.fromkeys(blocks, layout)
