"""Building of a mode's drafter from the parts of a loaded model."""

from __future__ import annotations

from sharesd.drafters import registry
from sharesd.drafters.base import BuildInputs, Drafter
from sharesd.drafters.hybrid.drafter import build as build_mix
from sharesd.drafters.selection import active_drafters


def build_drafter(mode: str, inputs: BuildInputs) -> Drafter | None:
    """Build the drafter of a mode; None for plain decoding."""
    if mode == registry.NAIVE:
        return None
    spec = registry.spec_of(mode)
    if spec.is_model:
        return inputs.build(spec)
    return build_mix(inputs, mode, active_drafters(inputs.config, mode))
