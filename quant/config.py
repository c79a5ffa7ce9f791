"""How the drafter's linears are quantized (to be written)."""
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True, slots=True)
class QuantConfig:
    """placeholder"""
