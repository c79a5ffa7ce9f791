"""Report of a start: times and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from quant.quantize_model import QuantReport


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Time and memory that a start took."""

    load_seconds: float
    """Reading, converting, quantizing and packing weights."""
    compile_seconds: float
    """Compiling and warming up."""
    weight_bytes: int
    """Weights of the target at full precision."""
    quant: QuantReport | None
    """The target's quantized linears (share), or those of the classic copy."""
    resident_share: float = 1.0
    """Share of blocks whose full-precision weights are resident."""
    max_context: int = 0
    """Maximum tokens of prompt and answer per row of the KV cache."""
    predicted: float | None = None
    """Tokens per second predicted by the offload plan.

    None if all weights are resident.
    """
