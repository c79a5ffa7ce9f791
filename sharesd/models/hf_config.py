"""Fields of a Hugging Face config; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharesd.models.decoder_config import UnsupportedArchitecture

NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Fields whose null disables a feature; in others null is the default."""


class HFConfig:
    """Fields of a Hugging Face config, over the defaults of its family."""

    def __init__(self, model_type: str, defaults: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        self.model_type = model_type
        self._fields = {**defaults, **{k: v for k, v in fields.items() if v is not None or k in NULLABLE}}

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field; `default` if the config leaves it out."""
        return self._fields.get(key, default)

    def require(self, key: str) -> Any:
        """Return a field; ValueError if the config leaves it out."""
        if key not in self._fields:
            raise ValueError(f"config.json of this {self.model_type} checkpoint has no {key!r}")
        return self._fields[key]

    def unsupported(self, feature: str) -> UnsupportedArchitecture:
        """Error that names a feature which the native decoder lacks."""
        return UnsupportedArchitecture(
            f"architecture {self.model_type!r} with {feature} is not supported by the native decoder"
        )
