"""What drafts where nothing was chosen: drafters of mode `auto`, and drafts by the target's own weights.

Mode `auto` has model drafters that pay, and tables. Weights of the target add no bytes: upper halves of Q8_0, and
fewer experts of a mixture.

Chosen before any weights are read; `speculation/draft_policy.py` measures which one drafts in a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compile.adaptive_threads import STEP_THREADS
from compile.cpp_extension import prepare
from compile.op_registry import runs_cpp
from quant.config import QuantConfig
from sharesd.config import CompileMode, EngineConfig
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import Need, Support
from sharesd.models.checkpoint import STORED, TARGET_QUANT
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import DecoderConfig, UnsupportedArchitecture
from sharesd.models.loader import native_config
from sharesd.startup.conflicts import stored_drafts_obstacle
from sharesd.weights.backend import backend_for
from sharesd.weights.memory_estimate import MemoryEstimate
from sharesd.weights.packing import has_quantized_kernels
from sharesd.weights.quantize import solver_config
from sharesd.weights.sizes import quantizer_for

NESTED = QuantConfig(method="nested")


def fewer_experts(chosen: int) -> QuantConfig:
    """Return drafts of a mixture that chooses this many experts for a token."""
    return QuantConfig(method="stored", experts=min(2, chosen - 1))


def with_stored_drafts(config: EngineConfig, modes: Sequence[str], folder: Path, device: torch.device) -> EngineConfig:
    """Return a config whose drafts add no bytes, if weights run as stored and have upper halves, or are a mixture's.

    Of a mixture drafts read fewer experts, on a GPU whatever its weights. A quantization that was given is kept.
    """
    nested = replace(config, quant=NESTED)
    drafters = selection.active_drafters(nested, *modes)
    is_given = not config.offload.choose_bits or config.quant != EngineConfig().quant
    if is_given or not registry.those(drafters, Need.QUANTIZED_TARGET):
        return config
    obstacle = stored_drafts_obstacle(nested, drafters, str(device))
    quant = NESTED if obstacle is None and _is_q8(config, folder) else None
    if (obstacle is None or lacks_copies(config, device)) and (chosen := chooses_experts(folder, device)) > 1:
        fewer = fewer_experts(chosen)
        quant = fewer if quant is None else replace(quant, experts=fewer.experts)
    if quant is None or stored_drafts_obstacle(replace(config, quant=quant), drafters, str(device)) is not None:
        return config
    return replace(config, quant=quant)


def lacks_copies(config: EngineConfig, device: torch.device) -> bool:
    """Return True if no quantized copies of a mixture's experts draft.

    Its weights run as they are stored, or on a GPU, where copies of experts have no kernel.
    """
    return config.dequantize is False or device.type == "cuda"


def _is_q8(config: EngineConfig, folder: Path) -> bool:
    """Return True if most weights are Q8_0."""
    if (folder / TARGET_QUANT).exists():
        return config.target_quant == "q8_0"
    if not (folder / STORED).exists():
        return False

    from sharesd.models.gguf.weights import q8_share  # the package gguf takes time to import

    return q8_share(folder) >= 0.5


def chooses_experts(folder: Path, device: torch.device) -> int:
    """Return the experts of a token; 0 for a model that is not a mixture, or not a native decoder."""
    try:
        found = native_config(folder, device).experts
    except UnsupportedArchitecture:
        return 0
    return 0 if found is None else found.num_experts_per_tok


PAYS = 1.1
"""Minimum predicted speedup to draft with quantized linears."""
SOLVE_SECONDS = 20.0
"""Maximum seconds of quantization at start.

Its result is cached on disk, so later starts do not repeat it.
"""
VERIFIED = 8
"""Maximum draft tokens of the estimated round."""


@dataclass(frozen=True, slots=True)
class AutoDrafters:
    """Drafters of mode `auto`."""

    drafters: tuple[str, ...]
    reason: str
    """Reason for the first model drafter, or for having none."""

    def __str__(self) -> str:
        return f"mode auto drafts with {', '.join(self.drafters)}: {self.reason}"


def choose_drafters(
    config: EngineConfig,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    how: CompileMode,
    *,
    offloads: bool = False,
    one_model: bool = False,
) -> AutoDrafters:
    """Choose drafters of mode auto before weights are read.

    A given head or draft model is used. Quantized linears are if their costs promise a gain; on a CPU next to a head,
    too, since they agree with sampled tokens more often.

    Args:
        how: compile mode.
        offloads: weights are fetched for each pass, so that a resident drafter saves time.
        one_model: leave out quantized linears next to a head, for want of memory.
    """
    model, reason = _model_drafter(config, folder, device, dtype, how, offloads)
    kind = registry.spec_of(model).kind if model else ""
    models = [model] if model else []
    if kind == "head" and model not in config.inner_heads and device.type == "cpu" and not one_model:
        shape = native_config(folder, device)
        copies, _ = _quantized_linears(config, shape, folder, device, dtype, how, offloads)
        models += [copies] if copies else []
    if model and device.type == "cuda":
        kind = "head"  # tables that learn from logits take 16 launches in each round, also while they pause
    tables = [spec.name for spec in registry.specs("table") if kind in spec.auto_with]
    return AutoDrafters((*models, *tables), reason)


def _head(config: EngineConfig) -> tuple[str, str] | None:
    """Return the mode of the head to draft with, and the reason; None without one."""
    given = (*map(selection.head_mode, config.heads), *registry.names("head"))
    heads = [mode for mode in given if selection.has_head(config, mode)]
    if config.tensor_parallel > 1:
        heads = [mode for mode in heads if not registry.lacking((mode,), Support.TENSOR_PARALLEL)]
    if heads and heads[0] in config.inner_heads:
        return heads[0], "the checkpoint has its layer"
    if heads:
        return heads[0], "a trained head was given" if config.heads else "a trained head ships with this model"
    return None


def _model_drafter(
    config: EngineConfig, folder: Path, device: torch.device, dtype: torch.dtype, how: CompileMode, offloads: bool
) -> tuple[str | None, str]:
    if config.draft is not None:
        return selection.needing(Need.SECOND_MODEL)[0], f"the draft model {config.draft} was given"
    try:
        shape = native_config(folder, device)
    except UnsupportedArchitecture as error:
        return None, f"the model runs through transformers ({error})"
    if device.type == "cuda" and config.quant.format.solver is not None and not has_quantized_kernels(device):
        return None, "there are no kernels for quantized linears here; pip install gemlite"
    if offloads and not (shape.experts is not None and device.type == "cuda"):
        shares = selection.needing(Need.QUANTIZED_TARGET)[0]
        return shares, "its quantized linears stay in memory while the others are offloaded"
    return _head(config) or _quantized_linears(config, shape, folder, device, dtype, how, offloads)


def _quantized_linears(
    config: EngineConfig,
    shape: DecoderConfig,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    how: CompileMode,
    offloads: bool,
) -> tuple[str | None, str]:
    """Return the drafter that uses the target's own weights in fewer bits if it pays, else None; and the reason."""
    shares = selection.needing(Need.QUANTIZED_TARGET)[0]
    chosen = 0 if shape.experts is None else shape.experts.num_experts_per_tok
    if chosen > 1 and not offloads and lacks_copies(config, device) and not config.quant.format.keeps_weights:
        decoder, quant = Decoder(shape, dtype=dtype, device="meta"), fewer_experts(chosen)
        speedup = _predicted_speedup(decoder, replace(config, quant=quant), folder, device, dtype, how)
        reason = f"the predicted speedup of drafts with fewer experts is {speedup:.2f}x"
        return (shares, reason) if speedup >= PAYS else (None, f"{reason}, below the threshold of {PAYS}x")
    if config.dequantize is False and not config.quant.format.keeps_weights:
        return None, "share would be no faster: the target already runs on quantized weights"
    if chosen and device.type == "cuda" and not config.quant.format.keeps_weights:
        return None, "quantized copies of a mixture run on CPUs alone"
    if config.quant.format.solver is None:
        return shares, f"drafts by {config.quant} were asked for"
    if device.type == "cpu" and not runs_cpp(device):
        return None, "without CPU kernels quantized linears gain little"
    decoder = Decoder(shape, dtype=dtype, device="meta")
    try:
        quantizer = quantizer_for(decoder, config.quant, solver_config(device, folder, quant=config.quant))
    except ValueError as error:
        return None, f"its linears cannot be quantized ({error})"
    speedup = _predicted_speedup(decoder, config, folder, device, dtype, how)
    if speedup < PAYS:
        return None, f"the predicted speedup of quantized drafts is {speedup:.2f}x, below the threshold of {PAYS}x"
    seconds = quantizer.solve_seconds() if device.type == "cpu" else 0.0  # a GPU takes seconds
    if seconds > SOLVE_SECONDS:
        return None, (f"quantizing takes about {_shown(seconds)}; run once with --mode {shares} to cache it")
    return shares, f"the predicted speedup of quantized drafts is {speedup:.2f}x"


def _predicted_speedup(
    decoder: Decoder, config: EngineConfig, folder: Path, device: torch.device, dtype: torch.dtype, how: CompileMode
) -> float:
    """Predict the speedup of chains from timed products and typical acceptance."""
    if how == "native":
        prepare(str(dtype).removeprefix("torch."))
    if config.threads is not None:
        STEP_THREADS.fix(config.threads)
    mode = selection.needing(Need.QUANTIZED_TARGET)[0]
    shared = replace(config, mode=mode, draft=None, auto_drafters=())
    backend = backend_for(device, dtype, 1 + VERIFIED, config.max_batch)
    parts = MemoryEstimate(decoder, shared, (mode,), folder, backend)
    plain, verify, draft = parts.step_seconds(config.quant, 1 + VERIFIED)
    backend.release_freed()
    alpha = config.quant.format.acceptance[config.quant.bits]
    row = (verify - plain) / VERIFIED
    return max(
        (1 - alpha ** (num + 1)) / (1 - alpha) * plain / (num * draft + plain + num * row)
        for num in range(1, VERIFIED + 1)
    )


def _shown(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
