"""Header of a .gguf file to a config.json, for native architectures.

Only files all of whose fields and tensors are known are converted; UnsupportedArchitecture names the unknown one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sharesd.models import rope as rope_rules
from sharesd.models.architecture import GGUFLayout
from sharesd.models.architectures import architectures
from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd.models.gguf.reader import GGUFFile

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
_HEADS = ("vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length")
_SCALING = ("rope.scaling.type", "rope.scaling.factor")

_OPTIONAL = ("attention.head_count_kv", "rope.freq_base")


def layout_of(file: GGUFFile) -> tuple[str, GGUFLayout]:
    """Return `model_type` and layout of a file's architecture; raises UnsupportedArchitecture."""
    for architecture in architectures():
        if architecture.gguf is not None and architecture.gguf.name == file.architecture:
            return architecture.model_type, architecture.gguf
    raise UnsupportedArchitecture(f"architecture {file.architecture!r} is not known")


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Return the file's config.json.

    Raises UnsupportedArchitecture for a field that is not known, ValueError for a missing one.
    """
    model_type, layout = layout_of(file)
    prefix = f"{file.architecture}."
    fields = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    sizes = _SIZES | dict(layout.fields)
    for key in fields:
        if key not in sizes and key not in _HEADS and not (layout.rope_scaling and key in _SCALING):
            raise UnsupportedArchitecture(f"field {prefix + key!r} is not known")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(fields.get(key), list):
            raise UnsupportedArchitecture(f"field {prefix + key!r} differs between layers")
    config = {name: fields[key] for key, name in sizes.items() if key in fields}
    missing = [prefix + key for key, name in _SIZES.items() if name not in config and key not in _OPTIONAL]
    if missing or "token_embd.weight" not in file.tensors:
        raise ValueError(f"the file has no {', '.join(missing) or 'token_embd.weight'}; download it again")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config["head_dim"] = _head_dim(fields, config["hidden_size"] // config["num_attention_heads"])
    config |= layout.extra_config(config)
    config |= _rope(file, fields, config)
    return config | {
        "architectures": [layout.class_name],
        "model_type": model_type,
        "dtype": "bfloat16",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.tokenizer("bos_token_id"),
        "eos_token_id": file.tokenizer("eos_token_id"),
    }


def _head_dim(fields: Mapping[str, Any], default: int) -> int:
    named = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    dims = {fields[key] for key in named if key in fields} or {default}
    if len(dims) > 1:
        raise UnsupportedArchitecture(f"heads of several sizes ({', '.join(map(str, sorted(dims)))}) are not known")
    return dims.pop()


def _rope(file: GGUFFile, fields: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope scaling of a file; empty if there is none."""
    kind = fields.get("rope.scaling.type", "none")
    if kind == "linear" and "rope.scaling.factor" in fields:
        return {"rope_scaling": {"rope_type": "linear", "factor": fields["rope.scaling.factor"]}}
    if kind != "none":
        raise UnsupportedArchitecture(f"rope scaling {kind!r} is not known")
    stored = file.tensors.get("rope_freqs.weight")
    if stored is None:
        return {}
    divisors_r = torch.from_numpy(stored.data.view("<f4").copy())
    theta, dim, positions = config.get("rope_theta", 10_000.0), config["head_dim"], config["max_position_embeddings"]
    plain_r, _ = rope_rules.frequencies({"rope_type": "default", "rope_theta": theta}, dim, positions)
    llama3 = {"rope_type": "llama3", "factor": divisors_r.max().item(), "original_max_position_embeddings": 8192}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wanted_r, _ = rope_rules.frequencies(llama3 | {"rope_theta": theta}, dim, positions)
    if divisors_r.shape != plain_r.shape or not torch.allclose(plain_r / divisors_r, wanted_r, rtol=1e-4, atol=0):
        raise UnsupportedArchitecture("the divisors in rope_freqs.weight are not known")
    return {"rope_scaling": llama3}
