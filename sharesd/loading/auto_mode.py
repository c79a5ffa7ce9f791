"""Drafters of mode `auto`: one model drafter where one pays, and tables, which cost next to nothing.

Chosen before any weights are read. Which of them drafts in a round is measured while they run (`decoding/policy.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compile.adaptive_threads import CREW
from compile.cpp_extension import prepare
from sharesd.config import HEADS, CompileMode, EngineConfig, mode_of_head
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import Unsupported
from sharesd.models.loader import decoder_config
from sharesd.weights.backend import home_of
from sharesd.weights.memory_estimate import ASSUMED, Parts, quantizer_of
from sharesd.weights.packing import has_low_kernels
from sharesd.weights.quantize import solving

TABLE_DRAFTERS = ("suffix", "recycle")
"""Tables that draft trees. `ngram` finds nothing that `suffix` does not. Beside a head, `recycle` costs 1 to 9 % more
than it gains (docs/results/README.md)."""
PAYS = 1.1
"""Speedup that quantized linears must promise to be taken."""
SOLVE_SECONDS = 20.0
"""Longest quantizing at start. Once done it is kept on disk, and costs nothing from then on."""
VERIFIED = 8
"""Draft tokens of the round that is estimated at most."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Drafters of mode `auto`."""

    drafters: tuple[str, ...]
    reason: str
    """Reason for the model drafter, or for having none."""

    def __str__(self) -> str:
        return f"mode auto drafts with {', '.join(self.drafters)}: {self.reason}"


def choose(
    config: EngineConfig, folder: Path, device: torch.device, dtype: torch.dtype, how: CompileMode, *, offloads: bool
) -> Choice:
    """Choose by what there is (a head, a draft model), else by what quantized linears would cost and gain.

    `how` steps are compiled. `offloads`: weights do not all stay, so that a drafter which stays always pays.
    """
    model, reason = _model_drafter(config, folder, device, dtype, how, offloads)
    tables = TABLE_DRAFTERS[:1] if model in HEADS else TABLE_DRAFTERS
    return Choice((*([model] if model else []), *tables), reason)


def _model_drafter(
    config: EngineConfig, folder: Path, device: torch.device, dtype: torch.dtype, how: CompileMode, offloads: bool
) -> tuple[str | None, str]:
    if config.draft is not None:
        return "classic", f"the draft model {config.draft} was given"
    try:
        shape = decoder_config(folder)
    except Unsupported as error:
        return None, f"the model runs through transformers ({error})"
    if device.type == "cuda" and config.quant.method == "hqq" and not has_low_kernels(device):
        return None, "there are no kernels for quantized linears here; pip install gemlite"
    if offloads:
        return "share", "its quantized linears stay in memory while the others are offloaded"
    heads = [mode for mode in (*map(mode_of_head, config.heads), *HEADS) if config.head_of(mode) is not None]
    if heads and config.tensor_parallel == 1:
        return heads[0], "a trained head was given" if config.heads else "a trained head ships with this model"
    if config.quant.method != "hqq":
        return "share", f"drafts by {config.quant} were asked for"
    decoder = Decoder(shape, dtype=dtype, device="meta")
    try:
        quantizer = quantizer_of(decoder, config.quant, solving(device, folder))
    except ValueError as error:
        return None, f"its linears cannot be quantized ({error})"
    speedup = _predicted_speedup(decoder, config, folder, device, dtype, how)
    if speedup < PAYS:
        return None, f"quantized linears promise {speedup:.2f} times plain decoding here, and {PAYS} is asked of them"
    seconds = quantizer.solve_seconds() if device.type == "cpu" else 0.0  # a GPU takes seconds
    if seconds > SOLVE_SECONDS:
        return None, (
            f"quantizing would take about {_shown(seconds)}; after one start with mode share it is kept, and used here"
        )
    return "share", f"quantized linears promise {speedup:.2f} times plain decoding"


def _predicted_speedup(
    decoder: Decoder, config: EngineConfig, folder: Path, device: torch.device, dtype: torch.dtype, how: CompileMode
) -> float:
    """Predict the speedup of chains: timed products, and the usual acceptance of these bits."""
    if how == "native":
        prepare(str(dtype).removeprefix("torch."))
    if config.threads is not None:
        CREW.fix(config.threads)
    shared = replace(config, mode="share", draft=None, auto_drafters=())
    home = home_of(device, dtype, 1 + VERIFIED, config.max_batch)
    parts = Parts(decoder, shared, ("share",), folder, home)
    plain, verify, draft = parts.step_seconds(config.quant, 1 + VERIFIED)
    home.give_back()
    alpha = ASSUMED[config.quant.bits]
    row = (verify - plain) / VERIFIED
    return max(
        (1 - alpha ** (num + 1)) / (1 - alpha) * plain / (num * draft + plain + num * row)
        for num in range(1, VERIFIED + 1)
    )


def _shown(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
