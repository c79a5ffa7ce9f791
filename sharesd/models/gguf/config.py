"""Header of a .gguf file to a config.json, for native architectures.

Every key and tensor is used or known to be without effect; UnknownKey names the first other one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gguf
import torch
from torch import Tensor

from sharesd.models import rope as rope_rules
from sharesd.models.architecture import GGUFLayout
from sharesd.models.architectures import architectures
from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd.models.gguf.reader import (
    NEUTRAL,
    WITHOUT_EFFECT,
    GGUFFile,
    is_close,
    is_neutral,
    unknown_key,
    unknown_tensor,
)
from sharesd.models.gguf.tokenizer import end_ids, token_id

LONG, SHORT, DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
ROPE_TENSORS = (LONG, SHORT, DIVISORS)
"""Tensors that become fields of config.json."""

ROPE_FIELDS = (
    *(f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "attn_factor")),
    *(f"rope.scaling.yarn_{key}" for key in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")),
    "rope.scale_linear",
)
"""Keys that are read here."""


def rope_of(
    file: GGUFFile, fields: Mapping[str, Any], config: Mapping[str, Any], kinds: tuple[str, ...]
) -> dict[str, Any]:
    """Return the rope scaling of a file as fields of config.json.

    Empty if there is none. `kinds`: rules that the family's positions can follow. Raises UnknownKey for others.
    """
    prefix, positions = f"{file.architecture}.", config["max_position_embeddings"]
    named = fields.get("rope.scaling.type", "linear")  # a factor alone is linear
    factor_key = "rope.scaling.factor" if "rope.scaling.factor" in fields else "rope.scale_linear"
    factor = (fields.get(factor_key, 0.0) or 1.0) if named != "none" else 1.0
    original = fields.get("rope.scaling.original_context_length", positions)
    magnitude = fields.get("rope.scaling.attn_factor", 1.0)
    stored = {name: _values(file, name) for name in ROPE_TENSORS if name in file.tensors}
    rule = _rule(named, factor, magnitude, stored.keys())
    if named not in ("none", "linear", "yarn", "longrope") or (named == "longrope" and LONG not in stored):
        raise unknown_key(prefix + "rope.scaling.type", named)
    if rule not in kinds and rule in ("yarn", "linear"):
        raise unknown_key(prefix + (factor_key if rule == "linear" else "rope.scaling.type"), fields.get(factor_key))
    if rule not in kinds:
        raise (
            unknown_tensor(next(iter(stored)))
            if stored
            else unknown_key(prefix + "rope.scaling.attn_factor", magnitude)
        )
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
        if missing := {LONG, SHORT} - stored.keys():
            raise ValueError(f"the file has no tensor {min(missing)!r}, which its rope needs; download it again")
        if DIVISORS in stored:
            raise unknown_tensor(DIVISORS, f"is stored next to {LONG!r}")
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
    """Return YaRN's parameters; llama.cpp multiplies the usual magnitude by `attn_factor`.

    `yarn_log_multiplier` has the magnitude of all numbers of a head, by which the usual one is divided.
    """
    for key, usual in (("ext_factor", (1.0, -1.0)), ("attn_factor", (1.0, -1.0))):
        value = fields.get(f"rope.scaling.yarn_{key}", 1.0)
        if value not in usual:
            raise unknown_key(f"{prefix}rope.scaling.yarn_{key}", value)
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if fields.get(f"rope.scaling.yarn_{name}", -1.0) > 0:
            scaling[name] = fields[f"rope.scaling.yarn_{name}"]
    if beta := fields.get("attention.temperature_scale", 0.0):
        scaling["llama_4_scaling_beta"] = beta
    if all_dim := fields.get("rope.scaling.yarn_log_multiplier", 0.0):
        scaling |= {"mscale": 1.0, "mscale_all_dim": all_dim}
    if magnitude != 1.0:
        log = 0.1 * math.log(factor) if factor > 1 else 0.0
        scaling["attention_factor"] = magnitude * (log + 1.0) / (all_dim * log + 1.0)
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


_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_FRACTIONS = ("rms_norm_eps", "rope_theta")
_OPTIONAL = ("attention.head_count_kv", "rope.freq_base")
_HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_PATTERN, _WINDOW = "attention.sliding_window_pattern", "attention.sliding_window"


def layout_of(file: GGUFFile) -> tuple[str, GGUFLayout]:
    """Return `model_type` and layout of a file's architecture; raises UnsupportedArchitecture."""
    if not file.architecture:
        raise ValueError("it has no general.architecture; download it again")
    layouts = [(each.model_type, each.gguf) for each in architectures() if each.gguf is not None]
    found = [(model_type, layout) for model_type, layout in layouts if layout.name == file.architecture]
    if not found:
        raise UnsupportedArchitecture(f"architecture {file.architecture!r} is not known")
    has_experts = bool(fields_of(file).get("expert_count"))

    def misfit(named: tuple[str, GGUFLayout]) -> tuple[bool, bool, bool]:
        _, layout = named
        is_own = bool(layout.own_part) and any(f".{layout.own_part}." in name for name in file.tensors)
        return ("expert_count" in layout.fields) != has_experts, bool(layout.own_part) and not is_own, not is_own

    return min(found, key=misfit)


def fields_of(file: GGUFFile) -> dict[str, Any]:
    """Return the keys below the architecture, without its name.

    Lists that are equal for all layers become one value.
    """
    prefix = f"{file.architecture}."
    fields = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    for key, value in fields.items():
        if key != _PATTERN and isinstance(value, list) and len(set(map(repr, value))) == 1:
            fields[key] = value[0]
    return fields


def check_blocks(file: GGUFFile) -> None:
    """Raise ValueError if a file has fewer tensors than blocks, or no block of the text."""
    fields = fields_of(file)
    if fields.get("nextn_predict_layers") and not any(name.startswith("blk.0.") for name in file.tensors):
        raise ValueError("it holds a layer for multi-token prediction alone; give a file with all layers")
    blocks = fields.get("block_count", 0)
    if isinstance(blocks, int | float) and blocks > len(file.tensors):
        raise ValueError(f"it has {len(file.tensors)} tensors for {blocks} blocks; download it again")


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Return the file's config.json.

    Raises UnknownKey for a key that is not known, ValueError for a missing one.
    """
    model_type, layout = layout_of(file)
    check_blocks(file)
    prefix, fields, sizes = f"{file.architecture}.", fields_of(file), _SIZES | dict(layout.fields)
    config = {name: fields[key] for key, name in sizes.items() if key in fields}
    needed = dict(_SIZES) | {key: name for key, name in layout.fields.items() if name == "moe_intermediate_size"}
    optional = (*_OPTIONAL, "feed_forward_length") if len(needed) > len(_SIZES) else _OPTIONAL
    missing = [prefix + key for key, name in needed.items() if name not in config and key not in optional]
    if missing or "token_embd.weight" not in file.tensors:
        raise ValueError(f"it has no {', '.join(missing) or 'token_embd.weight'}; download it again")
    if layout.always_lists or (layout.layer_kind and isinstance(config.get("num_key_value_heads"), list)):
        config |= _layers_without_heads(prefix, config, layout.layer_kind)
    if config.get("intermediate_size") == 0 and "moe_intermediate_size" in config:
        del config["intermediate_size"]  # Ollama's form of no dense layers
    for key, name in sizes.items():  # lists: layers of several sizes
        if name in config and (not isinstance(config[name], int | float) or (key in _SIZES and config[name] <= 0)):
            raise unknown_key(prefix + key, config[name])
        if key in _SIZES and name in config and not _fits(config[name], name):
            raise ValueError(f"its {prefix}{key} is {config[name]}, not a number of this kind; download it again")
    config = {"num_key_value_heads": config["num_attention_heads"], "rope_theta": 10_000.0} | config
    config |= _heads(prefix, fields, config, layout)
    _check_fields(prefix, fields, sizes, config, layout)
    config |= layout.extra_config(config)
    if layout.mixes_windows and _PATTERN in fields:
        config["layer_types"] = _layer_types(prefix, fields[_PATTERN], config["num_hidden_layers"])
    if layout.mixes_windows and "attention.scale" in fields:
        config["query_pre_attn_scalar"] = fields["attention.scale"] ** -2
    for name, parts in layout.biases.items():
        if any(f".{part}.bias" in stored for stored in file.tensors for part in parts):
            config[name] = True
    for name, part in layout.shown_by.items():
        config[name] = any(f".{part}." in stored for stored in file.tensors)
    config |= rope_of(file, fields, config, layout.ropes)
    if config.get("rope_scaling", {}).get("rope_type") == "yarn":
        config["rope_scaling"] |= layout.yarn_config
    ends = end_ids(file)
    return config | {
        "architectures": [layout.class_name],
        "model_type": model_type,
        "dtype": "bfloat16",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }


def _fits(value: Any, name: str) -> bool:
    """Return True for a finite number, which is whole if a size."""
    return math.isfinite(value) if name in _FRACTIONS else type(value) is int


def _heads(prefix: str, fields: Mapping[str, Any], config: Mapping[str, Any], layout: GGUFLayout) -> dict[str, Any]:
    """Return the size of heads, and how much of them is rotated."""
    default = config["hidden_size"] // config["num_attention_heads"]
    rotated = fields.get("rope.dimension_count")
    if rotated is not None and not layout.partial_rotary:  # old files name no other size
        default = rotated
    size = fields.get("attention.key_length", default)
    if fields.get("attention.value_length", size) != size:
        raise unknown_key(prefix + "attention.value_length", fields["attention.value_length"])
    if not isinstance(size, int) or size <= 0:
        raise unknown_key(prefix + "attention.key_length", size)
    if rotated in (None, size):
        return {"head_dim": size}
    if not layout.partial_rotary or int(size * (rotated / size)) != rotated:
        raise unknown_key(prefix + "rope.dimension_count", rotated)
    return {"head_dim": size, "partial_rotary_factor": rotated / size}


def _check_fields(
    prefix: str, fields: Mapping[str, Any], sizes: Mapping[str, str], config: Mapping[str, Any], layout: GGUFLayout
) -> None:
    """Raise UnknownKey for a key that is neither read nor without effect."""
    known = {*sizes, *_HEADS, *ROPE_FIELDS, *WITHOUT_EFFECT}
    if fields.get("rope.scaling.type") == "yarn":
        known |= set(layout.yarn_fields)
    if layout.mixes_windows:
        known |= {_PATTERN, "attention.scale"}
    head_dim, rotated = config["head_dim"], fields.get("rope.dimension_count", config["head_dim"])
    same = {"attention.key_length_swa": head_dim, "attention.value_length_swa": head_dim}
    same |= {"rope.dimension_count_swa": rotated, "rope.freq_base_swa": config.get("rope_theta", 10_000.0)}
    same |= {"attention.scale": head_dim**-0.5}
    same["attention.temperature_length"] = fields.get("rope.scaling.original_context_length", 0)
    for key, value in fields.items():
        if (
            key in known
            or key.startswith(layout.left_out)
            or is_neutral(key, value, NEUTRAL)
            or (key in same and is_close(value, same[key]))
        ):
            continue
        if key == _WINDOW and isinstance(value, int) and value >= config["max_position_embeddings"]:
            continue
        raise unknown_key(prefix + key, value)


def _layers_without_heads(prefix: str, config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the types of layers, which have as many key/value heads as a list says, or none: those of a `kind`."""
    heads, num_layers = config.get("num_key_value_heads"), config["num_hidden_layers"]
    key = prefix + "attention.head_count_kv"
    if heads is None:
        raise ValueError(f"it has no {key}; download it again")
    listed = heads if isinstance(heads, list) else [heads] * (num_layers if isinstance(num_layers, int) else 0)
    if isinstance(heads, list) and len(heads) != num_layers:
        raise ValueError(f"its {key} lists {len(heads)} layers, and there are {num_layers}; download it again")
    found = {each for each in listed if each}
    if len(found) != 1:
        raise unknown_key(key, heads)
    types = ["full_attention" if each else kind for each in listed]
    return {"num_key_value_heads": found.pop(), "layer_types": types}


def _layer_types(prefix: str, pattern: Any, num_layers: int) -> list[str]:
    """Return the layers' types.

    A list has one entry per layer, not 0 if it slides; of a number of layers the last has full attention.
    """
    if isinstance(pattern, list):
        if len(pattern) < num_layers:
            raise unknown_key(prefix + _PATTERN, pattern)
        slides = list(map(bool, pattern[:num_layers]))
    else:
        slides = [pattern == 0 or i % pattern < pattern - 1 for i in range(num_layers)]
    return ["sliding_attention" if each else "full_attention" for each in slides]
