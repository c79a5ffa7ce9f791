"""Best quantization measured by `sharesd tune`, for `--draft-quant auto`."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.config import QuantConfig
from sharesd import __version__
from sharesd.config import EngineConfig
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
    """Return a config's key; the target may be downloaded or converted."""
    import torch

    from sharesd.devices.selection import device_of, dtype_of
    from sharesd.models.checkpoint import content_hash
    from sharesd.models.hub import resolve_target

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


def best_quant(config: EngineConfig) -> QuantConfig:
    """Return the quantization of `--draft-quant auto`: the best measured, else the config's."""
    found = load_tuned(tuning_key(config))
    if found is None:
        log.info(
            "--draft-quant auto: nothing was measured for this model on this machine, so drafts use %s; "
            "`sharesd tune` measures",
            config.quant,
        )
        return config.quant
    log.info("--draft-quant auto: %s measured best for this model on this machine", found)
    return found


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
