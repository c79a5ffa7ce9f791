"""Acceptance measured in earlier answers, for offload plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quant.config import QuantConfig
from sharesd.engine.stats import Stats
from sharesd.models.checkpoint import identity
from sharesd_files import JsonCache

MAX_TRIES = 2000.0
"""Maximum weight of the evidence, in draft tokens; older tokens fade."""


def load_acceptance(folder: Path, mode: str, quant: QuantConfig, top: int) -> tuple[float, float]:
    """Return numbers of verified and accepted tokens, or levels of trees (`top`)."""
    return _read(_cache(folder, mode, quant, top))


def acceptance_recorder(folder: Path, mode: str, quant: QuantConfig, top: int) -> Callable[[Stats], None]:
    """Return a function that adds an answer's counts."""
    cache = _cache(folder, mode, quant, top)

    def keep(stats: Stats) -> None:
        fresh = stats.sources["accepted"] + stats.sources["recovered"], stats.sources["accepted"]
        if not fresh[0]:
            return
        tries, accepted = _read(cache)
        fading = min(1.0, max(0.0, MAX_TRIES - fresh[0]) / tries) if tries else 0.0
        cache.keep({"tries": fading * tries + fresh[0], "accepted": fading * accepted + fresh[1]})

    return keep


def _cache(folder: Path, mode: str, quant: QuantConfig, top: int) -> JsonCache:
    return JsonCache("settings", "acceptance", (identity(folder), mode, quant, top))


def _read(cache: JsonCache) -> tuple[float, float]:
    return cache.load(_counts) or (0.0, 0.0)


def _counts(found: Any) -> tuple[float, float]:
    tries, accepted = float(found["tries"]), float(found["accepted"])
    if not 0 <= accepted <= tries:
        raise ValueError(f"{accepted} of {tries} tokens were accepted")
    return tries, accepted
