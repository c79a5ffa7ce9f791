"""Rotary position embeddings: frequencies of every scaling rule, and the tables that a step gathers from.

Legend: P positions, r rotated half of a head (at most half its size).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor",),
}
"""Scaling rules and the parameters that each cannot do without."""


def frequencies(rope: Mapping[str, Any], head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Angles per position [r] in float32, and the factor on cosine and sine.

    `rope` holds a checkpoint's rope parameters in the newer naming (`rope_type`, `rope_theta`, ...).
    """
    kind, theta = rope["rope_type"], rope["rope_theta"]
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    powers_r = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind in ("default", "dynamic"):  # dynamic NTK scaling starts above max_positions, which is where we stop
        return 1.0 / powers_r, 1.0
    if kind == "linear":
        return 1.0 / powers_r / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(1.0 / powers_r, rope), 1.0
    if kind == "yarn":
        return _yarn(powers_r, dim, rope, max_positions)
    assert kind == "longrope", kind
    return _longrope(powers_r, rope, max_positions)


def context_limit(rope: Mapping[str, Any], max_positions: int) -> int:
    """Positions for which the frequencies above are those that the checkpoint means."""
    if rope["rope_type"] == "longrope":  # beyond, other factors apply to all positions, also to those already cached
        return min(max_positions, rope["original_max_position_embeddings"])
    if rope["rope_type"] == "yarn" and rope.get("factor"):
        return max(max_positions, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return max_positions


def tables(
    inv_freq_r: Tensor, factor: float, *, positions: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [P, r] of every position: computed in float32, then cast, as transformers does."""
    angles_Pr = torch.arange(positions, dtype=torch.float32)[:, None] * inv_freq_r
    return (angles_Pr.cos() * factor).to(device, dtype), (angles_Pr.sin() * factor).to(device, dtype)


def _llama3(inv_freq_r: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long waves are slowed down, short ones kept, those between are blended."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns_r = rope["original_max_position_embeddings"] / (2 * math.pi / inv_freq_r)
    blend_r = ((turns_r - low) / (high - low)).clamp(0, 1)
    return (1 - blend_r) * inv_freq_r / rope["factor"] + blend_r * inv_freq_r


def _yarn(powers_r: Tensor, dim: int, rope: Mapping[str, Any], max_positions: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071)."""
    original, theta = rope["original_max_position_embeddings"], rope["rope_theta"]
    factor = rope.get("factor") or max_positions / original

    def index_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index_of(rope.get("beta_fast") or 32), index_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    slowed_r = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    inv_freq_r = slowed_r / (factor * powers_r) + (1 - slowed_r) / powers_r

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return inv_freq_r, rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return inv_freq_r, magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return inv_freq_r, magnitude(1.0)


def _longrope(powers_r: Tensor, rope: Mapping[str, Any], max_positions: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753) up to the original context: the short factors."""
    original = rope["original_max_position_embeddings"]
    factor = max_positions / original
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (torch.tensor(rope["short_factor"], dtype=torch.float32) * powers_r), magnitude
