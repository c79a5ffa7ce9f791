"""The best quantization measured for a model on this machine: `sharesd tune` writes, `--draft-quant auto` reads.

One file of JSON for each model folder, dtype, device, processor and version of ShareSD.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quant.config import QuantConfig
from sharesd import __version__
from sharesd.config import EngineConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a measured setting holds for."""

    model: str
    """Absolute path of the checkpoint folder."""
    dtype: str
    device: str
    processor: str
    """Names of the CPU and, where it does the work, of the GPU."""
    version: str
    """Of ShareSD."""

    @property
    def file(self) -> Path:
        """Where the setting is kept."""
        from compile.cpp_extension import cache_root

        key = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return cache_root() / "settings" / f"share-{key[:16]}.json"


def place_of(config: EngineConfig) -> Place:
    """The place of a config. Imports torch, and downloads or converts the target where it is not here yet."""
    import torch

    from sharesd.devices.selection import device_of, dtype_of
    from sharesd.models.hub import resolve

    place = device_of(config.device)
    device, on_gpu = str(place), place.type == "cuda"
    names = [cpu_name(), *([torch.cuda.get_device_name(device)] if on_gpu else [])]
    return Place(
        model=str(resolve(config.target).resolve()),
        dtype=str(dtype_of(config.dtype, place)).removeprefix("torch."),
        device=device,
        processor=" + ".join(names),
        version=__version__,
    )


def remember(place: Place, quant: QuantConfig, facts: Mapping[str, Any]) -> Path:
    """Keep a setting, in place of an earlier one; returns the file. `facts` are for people who look into it."""
    entry = {"place": asdict(place), "quant": quant.spec, "skips": list(quant.skips), "facts": dict(facts)}
    file = place.file
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(entry, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
    return file


def recall(place: Place) -> QuantConfig | None:
    """The setting kept for a place; None where nothing was measured. An entry that cannot be read is left out."""
    file = place.file
    try:
        entry = json.loads(file.read_text(encoding="utf-8"))
        if entry["place"] != asdict(place):
            raise ValueError("it is of another place")
        return QuantConfig.parse(entry["quant"], entry["skips"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is ignored, it cannot be read (%s: %s)", file, type(error).__name__, error)
        return None


def best_quant(config: EngineConfig) -> QuantConfig:
    """Quantization of `--draft-quant auto`: the best measured, else the config's own; the log says which."""
    found = recall(place_of(config))
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
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
