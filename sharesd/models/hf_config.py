"""Fields of a Hugging Face config; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharesd.models.decoder_config import UnsupportedArchitecture

NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Fields whose null disables a feature; in others null is the default."""

CHANGING: dict[str, Any] = {
    "embedding_multiplier": 1,
    "attention_multiplier": None,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
    "scale_emb": 1,
    "scale_depth": None,
    "mup_width_scale": 1,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "clip_qkv": None,
    "alibi": False,
    "use_alibi": False,
    "parallel_attn": False,
    "use_parallel_residual": False,
    "use_bidirectional_attention": False,
    "attn_temperature_tuning": False,
    "attention_chunk_size": None,
    "no_rope_layers": None,
    "num_kv_shared_layers": 0,
}
"""Fields that change results in some families -> value without effect.

With another value, a family that does not read the field refuses it.
"""
CHANGING_ROPE: dict[str, Any] = {
    "alpha": None,
    "attn_factor": 1,
    "extrapolation_factor": 1,
    "llama_4_scaling_beta": 0,
    "short_mscale": None,
    "long_mscale": None,
}
"""The same, of the section about rope, for all families."""


class HFConfig:
    """Fields of a Hugging Face config, over the defaults of its family."""

    def __init__(self, model_type: str, defaults: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        self.model_type = model_type
        self._read: set[str] = set()
        self._fields = {**defaults, **{k: v for k, v in fields.items() if v is not None or k in NULLABLE}}

    def __contains__(self, key: str) -> bool:
        self._read.add(key)
        return key in self._fields

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field; `default` if the config leaves it out."""
        self._read.add(key)
        return self._fields.get(key, default)

    def require(self, key: str) -> Any:
        """Return a field; ValueError if the config leaves it out."""
        if key not in self:
            raise ValueError(f"config.json of this {self.model_type} checkpoint has no {key!r}; download it again")
        return self._fields[key]

    def unsupported(self, feature: str) -> UnsupportedArchitecture:
        """Error that names a feature which the native decoder lacks."""
        return UnsupportedArchitecture(
            f"architecture {self.model_type!r} with {feature} is not supported by the native decoder"
        )

    def refuse_unread(self) -> None:
        """Raise ValueError for a field that changes results, but was not read."""
        unread = {name: value for name, value in self._fields.items() if name in CHANGING and name not in self._read}
        ropes = [(f"{name}.", self._fields.get(name) or {}) for name in ("rope_scaling", "rope_parameters")]
        for known, section, fields in ((CHANGING, "", unread), *((CHANGING_ROPE, *rope) for rope in ropes)):
            for name, value in fields.items():
                if name in known and value not in (None, False, 0, [], known[name]):
                    raise ValueError(
                        f"config.json of this {self.model_type} checkpoint has {name!r} = {value!r}, which this "
                        "architecture does not compute; give the checkpoint under its own model_type, or load it "
                        f"without this key: --ignore-key {section}{name}"
                    )
