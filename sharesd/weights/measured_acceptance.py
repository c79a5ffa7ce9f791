"""How often drafts of a model held in earlier answers, for plans of offloading: kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from compile.cpp_extension import cache_root
from quant.config import QuantConfig
from sharesd.engine.stats import Stats
from sharesd.models.checkpoint import identity

log = logging.getLogger(__name__)

MOST = 2000.0
"""Drafted tokens that count: older ones fade."""


def kept_acceptance(folder: Path, mode: str, quant: QuantConfig, top: int) -> tuple[float, float]:
    """Drafted tokens that were looked at, those before them having held, and those of them that held: of chains (`top`
    0), or levels of trees in which `top` nodes have children. Zeros where nothing has been measured.
    """
    return _read(_file(folder, mode, quant, top))


def keeper(folder: Path, mode: str, quant: QuantConfig, top: int) -> Callable[[Stats], None]:
    """What adds an answer's counts to what is kept."""
    file = _file(folder, mode, quant, top)

    def keep(stats: Stats) -> None:
        fresh = stats.sources["accepted"] + stats.sources["recovered"], stats.sources["accepted"]
        if not fresh[0]:
            return
        tries, held = _read(file)
        fading = min(1.0, max(0.0, MOST - fresh[0]) / tries) if tries else 0.0
        counts = {"tries": fading * tries + fresh[0], "held": fading * held + fresh[1]}
        file.parent.mkdir(parents=True, exist_ok=True)
        partial_file = file.with_name(f".{file.name}.{os.getpid()}")
        partial_file.write_text(json.dumps(counts))
        partial_file.replace(file)

    return keep


def _file(folder: Path, mode: str, quant: QuantConfig, top: int) -> Path:
    what = repr((identity(folder), mode, quant, top))
    return cache_root() / "settings" / f"acceptance-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


def _read(file: Path) -> tuple[float, float]:
    """Drafted tokens that were looked at, and those of them that held."""
    try:
        found = json.loads(file.read_text())
        tries, held = float(found["tries"]), float(found["held"])
        if not 0 <= held <= tries:
            raise ValueError(f"{held} of {tries} tokens held")
        return tries, held
    except FileNotFoundError:
        return 0.0, 0.0
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s begins anew, it cannot be read (%s: %s)", file, type(error).__name__, error)
        return 0.0, 0.0
