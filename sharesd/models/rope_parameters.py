"""Rope parameters in configs of transformers 4 and 5; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharesd.models.hf_config import HFConfig

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor",),
}
"""Scaling rule -> parameters that it requires."""


def stored_rope(config: HFConfig) -> Mapping[str, Any]:
    """Return the config's section about rope; empty if there is none."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def read_rope(
    config: HFConfig,
    stored: Mapping[str, Any] | None = None,
    *,
    theta: float | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Mapping[str, Any]:
    """Return rope parameters in the naming of transformers 5.

    `stored`: a section instead of the config's. `theta`: if that has none, instead of the config's. `aliases`: further
    names of a rule -> its name in ROPE_TYPES.
    """
    stored = stored_rope(config) if stored is None else stored
    theta = config.get("rope_theta", 10_000.0) if theta is None else theta
    rope: dict[str, Any] = {"rope_theta": theta} | {k: v for k, v in stored.items() if v is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope["rope_type"] = ({"su": "longrope"} | dict(aliases or {})).get(kind, kind)
    if "partial_rotary_factor" in config:
        rope.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    if "original_max_position_embeddings" in config:
        rope["original_max_position_embeddings"] = config.get("original_max_position_embeddings")
    rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return rope


def context_limit(rope: Mapping[str, Any], max_position_embeddings: int) -> int:
    """Return the number of positions for which `sharesd.models.rope` has the checkpoint's frequencies."""
    if rope["rope_type"] == "longrope":  # beyond, other factors apply to all positions, also to those already cached
        return min(max_position_embeddings, rope["original_max_position_embeddings"])
    if rope["rope_type"] == "yarn" and rope.get("factor"):
        return max(max_position_embeddings, int(rope["original_max_position_embeddings"] * rope["factor"]))
    if rope["rope_type"] == "linear":
        return int(max_position_embeddings * rope["factor"])
    return max_position_embeddings
