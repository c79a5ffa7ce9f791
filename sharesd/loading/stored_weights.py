"""Choice between weights as files store them, and expanded ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from compile.cpp_extension import obstacle as cpu_kernels_obstacle
from compile.op_registry import runs_cpp, runs_triton
from quant.config import QuantConfig
from sharesd.config import EngineConfig
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import Need
from sharesd.loading.combination import Combination
from sharesd.models.checkpoint import STORED, TARGET_QUANT, Progress, is_stored, weight_files
from sharesd.models.conversion_cache import is_converted
from sharesd.models.hub import resolve_target

log = logging.getLogger(__name__)
NESTED = QuantConfig(method="nested")

HEADS_BESIDE_STORED = QuantConfig(bits=8, head_bits=8)
"""Default quantization of trained heads beside stored weights on a CPU.

In float32 a head would read four times the bytes, and a draft step cost a third of the target's.
"""


def folder_and_config(
    config: EngineConfig, device: torch.device, *, needs_numbers: bool, warns: bool, progress: Progress
) -> tuple[Path, EngineConfig]:
    """Return the target's folder, and the config with `dequantize` chosen.

    The embedded model is expanded, since its quantized copy drafts well then; so is what a `dtype` was given for.
    `needs_numbers`: tensors replace the file's, or blocks are offloaded by the caller.

    Raises:
        ValueError: weights that are to run as they are stored cannot; the message names a remedy.
    """
    obstacle = None
    if config.target_quant is not None:
        _check_target_quant(config, device, needs_numbers)
        config = replace(config, dequantize=False)
    if config.dequantize is None:
        wants_numbers = needs_numbers or config.target is None or config.dtype != "auto"
        obstacle = None if wants_numbers else _obstacle(config, device)
        config = replace(config, dequantize=True if wants_numbers or obstacle is not None else None)
    folder = resolve_target(config, progress=progress)
    if config.dequantize is False and not is_stored(folder):
        raise ValueError(
            f"{folder} is no .gguf file and has no quantized weights to run as they are; drop --no-dequantize"
        )
    if warns and obstacle is not None and is_converted(resolve_target(replace(config, lora=None))):
        size = f"{sum(file.stat().st_size for file in weight_files(folder)) / 1e9:.1f} GB"
        log.warning("weights are expanded to 16 bits, %s: stored ones do not go with %s", size, obstacle)
    if warns and config.target_quant is not None:
        log.warning("weights are quantized to %s at load: texts are those of the quantized model", config.target_quant)
    return folder, replace(config, dequantize=not is_stored(folder))


def with_head_quant(config: EngineConfig) -> EngineConfig:
    """Return the config with the default quantization of trained heads."""
    has_head = any(selection.head_of(config, mode) for mode in registry.names("head"))
    return replace(config, head_quant=config.head_quant or HEADS_BESIDE_STORED) if has_head else config


def with_nested_drafts(config: EngineConfig, modes: Sequence[str], folder: Path, device: torch.device) -> EngineConfig:
    """Return a config with nested drafts, if most weights are Q8_0.

    A quantization that was given is kept.
    """
    nested = replace(config, quant=NESTED)
    asked = Combination.of(nested, modes, device=str(device))
    is_given = not config.offload.choose_bits or config.quant != EngineConfig().quant
    if is_given or asked.nested_obstacle is not None or not asked.needs(Need.QUANTIZED_TARGET):
        return config
    if (folder / TARGET_QUANT).exists():
        return nested if config.target_quant == "q8_0" else config
    if not (folder / STORED).exists():
        return config

    from sharesd.models.gguf.stored import q8_share  # the package gguf takes time to import

    return nested if q8_share(folder) >= 0.5 else config


def _check_target_quant(config: EngineConfig, device: torch.device, needs_numbers: bool) -> None:
    obstacle = "weights that the caller makes or offloads" if needs_numbers else _obstacle(config, device)
    if obstacle is not None:
        raise ValueError(f"target_quant is {config.target_quant!r}, and does not go with {obstacle}; leave it out")
    reason = cpu_kernels_obstacle("quantize_ops") if device.type == "cuda" else None
    if reason is not None:
        raise ValueError(f"target_quant is {config.target_quant!r}, and its CPU kernel does not run here: {reason}")


def _obstacle(config: EngineConfig, device: torch.device) -> str | None:
    """Return what has no kernel for stored weights."""
    if config.kernels == "torch" or not (runs_cpp(device) or runs_triton(device)):
        return "torch's kernels"
    option = Combination.of(config, device=str(device)).blocks_obstacle
    return None if option is None else f"{option} yet"
