"""Base class of all body schemas."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Base schema without unknown keys, conversions, NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Loose(Strict):
    """Base schema that leaves unknown keys out."""

    model_config = ConfigDict(extra="ignore")
