"""Rope scaling of a .gguf file: keys, and tensors of divisors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gguf
import torch
from torch import Tensor

from sharesd.models import rope as rope_rules
from sharesd.models.gguf.keys import unknown_key, unknown_tensor
from sharesd.models.gguf.reader import GGUFFile

LONG, SHORT, DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
TENSORS = (LONG, SHORT, DIVISORS)
"""Tensors that become fields of config.json."""

FIELDS = (
    *(f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "attn_factor")),
    *(f"rope.scaling.yarn_{key}" for key in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")),
    "rope.scale_linear",
)
"""Keys that are read here."""


def rope_of(file: GGUFFile, fields: Mapping[str, Any], config: Mapping[str, Any], kinds: tuple[str, ...]) -> dict:
    """Return the rope scaling of a file as fields of config.json.

    Empty if there is none. `kinds`: rules that the family's positions can follow. Raises UnknownKey for others.
    """
    prefix, positions = f"{file.architecture}.", config["max_position_embeddings"]
    named = fields.get("rope.scaling.type", "linear")  # a factor alone is linear
    factor_key = "rope.scaling.factor" if "rope.scaling.factor" in fields else "rope.scale_linear"
    factor = (fields.get(factor_key, 0.0) or 1.0) if named != "none" else 1.0
    original = fields.get("rope.scaling.original_context_length", positions)
    magnitude = fields.get("rope.scaling.attn_factor", 1.0)
    stored = {name: _values(file, name) for name in TENSORS if name in file.tensors}
    rule = _rule(named, factor, magnitude, stored.keys())
    if named not in ("none", "linear", "yarn", "longrope") or (named == "longrope" and LONG not in stored):
        raise unknown_key(prefix + "rope.scaling.type", named)
    if rule not in kinds:
        if rule in ("yarn", "linear"):
            raise unknown_key(
                prefix + (factor_key if rule == "linear" else "rope.scaling.type"), fields.get(factor_key)
            )
        if not stored:
            raise unknown_key(prefix + "rope.scaling.attn_factor", magnitude)
        raise unknown_tensor(next(iter(stored)))
    pairs = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)) // 2
    for name, values_r in stored.items():
        if len(values_r) != pairs:
            raise ValueError(f"tensor {name!r} has {len(values_r)} values for {pairs} pairs; download the file again")
    if rule == "default":
        return {}
    if rule == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if rule == "yarn":
        if stored:
            raise unknown_tensor(next(iter(stored)), "goes with another rule than yarn")
        return {"rope_scaling": _yarn(fields, prefix, factor, original, magnitude)}
    if rule == "longrope":
        for name in (LONG, SHORT):
            if name not in stored:
                raise ValueError(f"the file has no tensor {name!r}, which its rope needs; download it again")
        if DIVISORS in stored:
            raise unknown_tensor(DIVISORS, f"stands beside {LONG!r}")
        if factor != 1.0:
            raise unknown_key(prefix + factor_key, factor)
        return _longrope(stored[SHORT], stored[LONG], original, magnitude)
    divisors_r = stored.get(DIVISORS, torch.ones(pairs))
    if factor == magnitude == 1.0 and (llama3 := _llama3(divisors_r, config)):
        return {"rope_scaling": llama3}
    return _longrope(divisors_r * factor, divisors_r * factor, positions, magnitude)


def _rule(named: str, factor: float, magnitude: float, stored: Any) -> str:
    """Return a rule of ROPE_TYPES, or "divisors".

    Divisors are stored numbers that divide the angles.
    """
    if LONG in stored or SHORT in stored:
        return "longrope"
    if named == "yarn":
        return "yarn"
    if DIVISORS in stored or magnitude != 1.0:
        return "divisors"
    return "linear" if factor != 1.0 else "default"


def _values(file: GGUFFile, name: str) -> Tensor:
    tensor = file.tensors[name]
    return torch.from_numpy(gguf.dequantize(tensor.data.reshape(1, -1), tensor.kind).reshape(-1).copy())


def _yarn(fields: Mapping[str, Any], prefix: str, factor: float, original: int, magnitude: float) -> dict[str, Any]:
    """Return YaRN's parameters; llama.cpp multiplies the usual magnitude by `attn_factor`."""
    for key, usual in (("ext_factor", (1.0, -1.0)), ("attn_factor", (1.0, -1.0))):
        value = fields.get(f"rope.scaling.yarn_{key}", 1.0)
        if value not in usual:
            raise unknown_key(f"{prefix}rope.scaling.yarn_{key}", value)
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if fields.get(f"rope.scaling.yarn_{name}", -1.0) > 0:
            scaling[name] = fields[f"rope.scaling.yarn_{name}"]
    if magnitude != 1.0:
        scaling["attention_factor"] = magnitude * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return scaling


def _longrope(short_r: Tensor, long_r: Tensor, original: int, magnitude: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": short_r.tolist(),
        "long_factor": long_r.tolist(),
    }
    scaling |= {"attention_factor": magnitude, "original_max_position_embeddings": original}
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _llama3(divisors_r: Tensor, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parameters of Llama 3.1's rule if it gives these divisors."""
    theta, dim, positions = config.get("rope_theta", 10_000.0), config["head_dim"], config["max_position_embeddings"]
    if len(divisors_r) != dim // 2:
        return None
    plain_r, _ = rope_rules.frequencies({"rope_type": "default", "rope_theta": theta}, dim, positions)
    llama3 = {"rope_type": "llama3", "factor": divisors_r.max().item(), "original_max_position_embeddings": 8192}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wanted_r, _ = rope_rules.frequencies(llama3 | {"rope_theta": theta}, dim, positions)
    return llama3 if torch.allclose(plain_r / divisors_r, wanted_r, rtol=1e-4, atol=0) else None
