"""Families of the native decoder, one file each; imports no torch.

Each module has a tuple `ARCHITECTURES`; a new file adds a family.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from sharesd.models.architecture import Architecture
from sharesd.models.decoder_config import DecoderConfig, UnsupportedArchitecture
from sharesd.models.hf_config import HFConfig, check_fields

_WITH_TOWERS = {"llava": "llama", "llava_next": "llama", "mistral3": "mistral"}
"""`model_type` whose `text_config` may be of any family -> its default."""


_registry: dict[str, Architecture] = {}
"""Architectures of the modules that have been imported, and those that were registered, by `model_type`."""


@cache
def _import(name: str) -> None:
    for found in importlib.import_module(f"{__name__}.{name}").ARCHITECTURES:
        _registry.setdefault(found.model_type, found)


def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        _import(module.name)


def _find(model_type: str) -> Architecture | None:
    """Return the architecture of this `model_type`. If a file has its name, no other is imported."""
    if model_type not in _registry and model_type in (module.name for module in pkgutil.iter_modules(__path__)):
        _import(model_type)
    if model_type not in _registry:
        _import_all()
    return _registry.get(model_type)


def architectures() -> list[Architecture]:
    """Return all architectures, by `model_type`."""
    _import_all()
    return sorted(_registry.values(), key=lambda each: each.model_type)


def register(architecture: Architecture) -> None:
    """Add an architecture, or replace the one of its `model_type`."""
    _registry[architecture.model_type] = architecture


def unregister(model_type: str) -> None:
    """Remove an architecture."""
    del _registry[model_type]


def model_types() -> list[str]:
    """Return the values of `model_type` that the native decoder serves."""
    return sorted(name for each in architectures() for name in (each.model_type, each.multimodal_type) if name)


def architecture_of(model_type: str) -> Architecture:
    """Return the architecture of this `model_type`; raises UnsupportedArchitecture."""
    found = _find(model_type)
    if found is None:
        served = ", ".join(model_types())
        raise UnsupportedArchitecture(f"architecture {model_type!r} has no native decoder; it serves {served}")
    return found


def config_from_hf(fields: Mapping[str, Any], *, refuses_unread: bool = False) -> DecoderConfig:
    """Return the DecoderConfig of a config.json of transformers 4 or 5.

    With `refuses_unread`, a field that changes results in other families is an error if this one does not read it.

    Raises:
        UnsupportedArchitecture: the native decoder does not compute a feature exactly.
        ValueError: a field is missing.
    """
    model_type = fields.get("model_type") or ""
    check_fields("damaged", {"model_type": model_type})
    inner = _WITH_TOWERS.get(model_type)
    if inner is None and _find(model_type) is None:
        inner = next((each.model_type for each in architectures() if model_type == each.multimodal_type != ""), None)
    if inner is not None:
        if not isinstance(fields.get("text_config"), Mapping):
            raise ValueError(f"config.json of this {model_type} checkpoint has no section 'text_config'")
        outer = {k: fields[k] for k in ("tie_word_embeddings", "eos_token_id") if fields.get(k) is not None}
        fields = {**outer, **{k: v for k, v in fields["text_config"].items() if v is not None or k not in outer}}
        fields |= {k: outer[k] for k in ("tie_word_embeddings",) if k in outer}  # the head belongs to the whole model
        model_type = fields.get("model_type", inner)
    check_fields(model_type, {"model_type": model_type})
    architecture = architecture_of(model_type)
    check_fields(model_type, fields)
    config = HFConfig(model_type, architecture.defaults, fields)
    found = architecture.to_decoder_config(config)
    if refuses_unread:
        config.refuse_unread()
    return found
