"""Best quantization that `sharesd tune` measured or calibrated, for `--draft-quant auto`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quant.config import QuantConfig, can_be_calibrated
from sharesd import __version__
from sharesd.config import EngineConfig
from sharesd.devices.host_memory import cpu_name
from sharesd.devices.selection import device_of, dtype_of
from sharesd.drafters import selection
from sharesd.drafters.registry import Need
from sharesd.models.checkpoint import content_hash
from sharesd.models.hub import resolve_target
from sharesd.weights.kept_calibration import REMEDY, KeptCalibration, other_calibration
from sharesd_files import JsonCache

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningKey:
    model: str
    """Hash of the checkpoint's content."""
    dtype: str
    device: str
    processor: str
    version: str

    @property
    def cache(self) -> JsonCache:
        return JsonCache("settings", "quant", self)


def tuning_key(config: EngineConfig) -> TuningKey:
    """Return the key of a config whose `dequantize` is chosen; the target may be downloaded or converted."""
    device = device_of(config.device)
    on_gpu = device.type == "cuda"
    names = [cpu_name(), *([torch.cuda.get_device_name(device)] if on_gpu else [])]
    return TuningKey(
        model=content_hash(resolve_target(config)),
        dtype=str(dtype_of(config.dtype, device)).removeprefix("torch."),
        device=str(device),
        processor=" + ".join(names),
        version=__version__,
    )


def save_tuned(key: TuningKey, quant: QuantConfig, facts: Mapping[str, Any]) -> Path:
    """Save a setting and informative `facts` in place of earlier ones."""
    return key.cache.save({"quant": quant.spec, "skips": list(quant.skips), "facts": dict(facts)})


def load_tuned(key: TuningKey) -> QuantConfig | None:
    """Return the saved setting; None if nothing was measured."""
    return key.cache.load(lambda entry: QuantConfig.parse(entry["quant"], entry["skips"]))


def best_quant(config: EngineConfig) -> QuantConfig | None:
    """Return the quantization of `--draft-quant auto`: the best measured, else the config's if it is calibrated.

    It is calibrated if there is a calibration of these weights in this quantization. Returns None if a start should
    choose as it does without the option.
    """
    key = tuning_key(config)
    found = load_tuned(key)
    if found is not None:
        log.info("--draft-quant auto: %s measured best for this model on this machine", found)
        return _calibrated(found, config, key.model)
    plain = _calibrated(config.quant, config, key.model)
    if plain.calibrated:
        return plain
    log.info(
        "--draft-quant auto: nothing was measured for this model on this machine, so drafts are the default; "
        "`sharesd tune` measures"
    )
    return None


def with_calibration(quant: QuantConfig, config: EngineConfig) -> QuantConfig:
    """Return a quantization as calibrated if that can be used, else as it is; the target may be downloaded."""
    if not can_be_calibrated(quant) or config.tensor_parallel > 1:
        return quant
    kept = KeptCalibration(content_hash(resolve_target(config)), quant)
    return kept.quant if kept.folder.exists() and kept.problem() is None else quant


def _calibrated(quant: QuantConfig, config: EngineConfig, weights: str) -> QuantConfig:
    """Return a quantization as calibrated, or as it is, with a line if there is a calibration that is not used."""
    plain = replace(quant, calibrated=False)
    if not can_be_calibrated(plain):
        return plain
    kept = KeptCalibration(weights, plain)
    if kept.folder.exists():
        problem = kept.problem()
        problem = None if problem is None else f"{problem}; {REMEDY}"
    else:
        gone = f"the calibration of {plain} is gone" if quant.calibrated else None
        problem = gone or other_calibration(resolve_target(config), weights)
    if problem is None and kept.folder.exists() and config.tensor_parallel > 1:
        problem = "the calibration is of whole linears, and ranks have parts of them"
    if problem is None and kept.folder.exists() and config.mode in selection.needing(Need.SECOND_MODEL):
        problem = f"the calibration is for drafts over the target's KV, and mode {config.mode} has KV of its own"
    if problem is not None:
        log.warning("--draft-quant auto: %s; drafts use %s without it", problem, plain)
    if problem is not None or not kept.folder.exists():
        return plain
    log.info("--draft-quant auto: drafts use the calibration in %s", kept.folder)
    return kept.quant
