"""Keys of what later starts reuse: measured step costs, and KV of prompts.

The key of costs includes everything that costs depend on, and no path: other weights of the same shapes cost the same.
That of KV includes everything that its bits depend on, besides the tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compile.adaptive_threads import STEP_THREADS
from compile.cpp_extension import kernels_version
from sharesd import __version__
from sharesd.devices.host_memory import cpu_name
from sharesd.drafters import registry, selection
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.checkpoint import content_hash, layout_hash
from sharesd.sampling_params import SamplingParams
from sharesd.startup.resolve import ResolvedConfig
from sharesd_files import JsonCache

if TYPE_CHECKING:
    from sharesd.weights.offloaded_decoder import OffloadedBlocks


def costs_file(
    resolved: ResolvedConfig,
    mode: str,
    params: SamplingParams,
    *,
    widths: Sequence[int] | None,
    streamed: OffloadedBlocks | None,
    folders: Sequence[Path] = (),
) -> JsonCache:
    """Return the cache of costs of a mode's rounds, which hybrids of the same drafters share.

    `folders`: checkpoints of second model and heads.
    """
    config, plan, device = resolved.config, resolved.plan, resolved.device
    tables = {spec.file for spec in registry.specs("table") if spec.file}
    files = selection.table_files(config, resolved.drafters).values()
    options = replace(
        config,
        target=None,
        lora=None,
        draft=None,
        revision=None,
        prefill_chunk=None,
        prompt_cache=None,
        prompt_cache_size=1,
        trace=None,
        mode=registry.NAIVE,
        hybrid_with=(),
        auto_drafters=(),
        heads=(),
        drafter_options={name: value for name, value in config.drafter_options.items() if name not in tables},
    )
    # Drafts take as long on any disk, and steps do not: costs of one that is half as fast again are others.
    transfer = plan and plan.offloads and round(2 * math.log2(plan.transfer_s))
    gpu = (torch.cuda.get_device_name(device), _cuda_kernels_version()) if device.type == "cuda" else None
    what = (
        *(__version__, torch.__version__, resolved.dtype, resolved.compile, widths, options),
        selection.active_drafters(config, mode),
        *map(layout_hash, (resolved.folder, *folders)),
        *(file.stat().st_size for file in files if file.exists()),
        *(cpu_name(), STEP_THREADS.max_size, device, kernels_version()),
        streamed and (streamed.stream.blocks, len(streamed.stream.slots)),
        *(transfer, gpu),
        replace(params, seed=0, max_new_tokens=1, stop=(), stop_token_ids=(), ignore_eos=False, logit_bias={}),
    )
    return JsonCache("settings", "costs", what)


FORMAT = 1
"""Version of the files of a prompt cache."""


def kv_identity(resolved: ResolvedConfig, cache: StaticKVCache, *, recompute_decoded_kv: bool) -> dict[str, str]:
    """Return the identity of a start's KV, by name."""
    config, device = resolved.config, resolved.device
    on_gpu = device.type == "cuda"
    kernels = (
        *(kernels_version(), resolved.compile, config.kernels, config.exact, recompute_decoded_kv),
        *((_cuda_kernels_version(), config.steady_cublas) if on_gpu else ()),
    )
    weights = (content_hash(resolved.folder), config.dequantize or config.activations, config.ignore_keys)
    state = cache.recurrent
    layout = [(tuple(tensor.shape[1:2]), tuple(tensor.shape[3:])) for tensor in (*cache.k, *cache.v)]
    return {
        "version": f"{__version__}, torch {torch.__version__}",
        "model": _digest(weights),
        "dtype": str(resolved.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "kernels": _digest(kernels),
        "KV format": _digest((FORMAT, layout, cache.taps, *(() if state is None else (state.layout,)))),
    }


def _cuda_kernels_version() -> str:
    from compile.cuda.gemm_config import kernels_version  # on GPUs only

    return kernels_version()


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]
