"""Drafts by the target's own weights, which add no bytes: upper halves of Q8_0, and fewer experts of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from quant.config import QuantConfig
from sharesd.config import EngineConfig
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import Need
from sharesd.models.checkpoint import STORED, TARGET_QUANT
from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd.models.loader import native_config
from sharesd.startup.conflicts import stored_drafts_obstacle

NESTED = QuantConfig(method="nested")


def fewer_experts(chosen: int) -> QuantConfig:
    """Return drafts of a mixture that chooses this many experts for a token."""
    return QuantConfig(method="stored", experts=min(2, chosen - 1))


def with_stored_drafts(config: EngineConfig, modes: Sequence[str], folder: Path, device: torch.device) -> EngineConfig:
    """Return a config whose drafts add no bytes, if weights run as stored and have upper halves, or are a mixture's.

    Of a mixture drafts read fewer experts, on a GPU whatever its weights. A quantization that was given is kept.
    """
    nested = replace(config, quant=NESTED)
    drafters = selection.active_drafters(nested, *modes)
    is_given = not config.offload.choose_bits or config.quant != EngineConfig().quant
    if is_given or not registry.those(drafters, Need.QUANTIZED_TARGET):
        return config
    obstacle = stored_drafts_obstacle(nested, drafters, str(device))
    quant = NESTED if obstacle is None and _is_q8(config, folder) else None
    if (obstacle is None or lacks_copies(config, device)) and (chosen := chooses_experts(folder, device)) > 1:
        fewer = fewer_experts(chosen)
        quant = fewer if quant is None else replace(quant, experts=fewer.experts)
    if quant is None or stored_drafts_obstacle(replace(config, quant=quant), drafters, str(device)) is not None:
        return config
    return replace(config, quant=quant)


def lacks_copies(config: EngineConfig, device: torch.device) -> bool:
    """Return True if no quantized copies of a mixture's experts draft.

    Its weights run as they are stored, or on a GPU, where copies of experts have no kernel.
    """
    return config.dequantize is False or device.type == "cuda"


def _is_q8(config: EngineConfig, folder: Path) -> bool:
    """Return True if most weights are Q8_0."""
    if (folder / TARGET_QUANT).exists():
        return config.target_quant == "q8_0"
    if not (folder / STORED).exists():
        return False

    from sharesd.models.gguf.weights import q8_share  # the package gguf takes time to import

    return q8_share(folder) >= 0.5


def chooses_experts(folder: Path, device: torch.device) -> int:
    """Return the experts of a token; 0 for a model that is not a mixture, or not a native decoder."""
    try:
        found = native_config(folder, device).experts
    except UnsupportedArchitecture:
        return 0
    return 0 if found is None else found.num_experts_per_tok
