"""Rotary position embeddings: frequencies of every scaling rule, and their tables.

Legend: P positions, r rotated half of a head (at most half its size).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def frequencies(rope: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """Return angles per position [r], and the factor on cosine and sine.

    The angles are in float32. `rope` holds rope parameters as `sharesd.models.hf_config` reads them.
    """
    kind, theta = rope["rope_type"], rope["rope_theta"]
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    powers_r = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind in ("default", "dynamic"):  # dynamic NTK scaling starts above these positions, where we stop
        return 1.0 / powers_r, 1.0
    if kind == "linear":
        return 1.0 / powers_r / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(1.0 / powers_r, rope), 1.0
    if kind == "yarn":
        return _yarn(powers_r, dim, rope, max_position_embeddings)
    assert kind == "longrope", kind
    return _longrope(powers_r, rope, max_position_embeddings)


def tables(
    inv_freq_r: Tensor, factor: float, *, positions: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [P, r] of every position.

    Computed in float32, then cast, as transformers does.
    """
    angles_Pr = torch.arange(positions, dtype=torch.float32)[:, None] * inv_freq_r
    return (angles_Pr.cos() * factor).to(device, dtype), (angles_Pr.sin() * factor).to(device, dtype)


def query_factors(beta: float, rope: Mapping[str, Any], positions: int) -> Tensor | None:
    """Return factors [P] of rotated queries, in float32; None if all are 1.

    They grow with the logarithm of the position, in steps of the original context (Llama 4, Ministral 3).
    """
    original = rope["original_max_position_embeddings"]
    if not beta or positions <= original:
        return None
    return 1 + beta * torch.log(1.0 + torch.arange(positions) // original)


def _llama3(inv_freq_r: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Return frequencies scaled by Llama 3.1's rule.

    Long waves are slowed down, short ones kept, those between are blended.
    """
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns_r = rope["original_max_position_embeddings"] / (2 * math.pi / inv_freq_r)
    blend_r = ((turns_r - low) / (high - low)).clamp(0, 1)
    return (1 - blend_r) * inv_freq_r / rope["factor"] + blend_r * inv_freq_r


def _yarn(powers_r: Tensor, dim: int, rope: Mapping[str, Any], max_position_embeddings: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071)."""
    original, theta = rope["original_max_position_embeddings"], rope["rope_theta"]
    factor = rope.get("factor") or max_position_embeddings / original

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


def _longrope(powers_r: Tensor, rope: Mapping[str, Any], max_position_embeddings: int) -> tuple[Tensor, float]:
    """Return frequencies and factor of LongRoPE, from its short factors.

    They hold up to the original context (Ding et al. 2024, arXiv 2402.13753).
    """
    original = rope["original_max_position_embeddings"]
    factor = max_position_embeddings / original
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (torch.tensor(rope["short_factor"], dtype=torch.float32) * powers_r), magnitude
