"""Cache of measured step costs.

Its key includes everything that costs depend on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from compile.adaptive_threads import STEP_THREADS
from compile.cpp_extension import kernels_version
from compile.cuda import gemm_config
from sharesd import __version__
from sharesd.drafters.registry import NAIVE
from sharesd.drafters.selection import second_model
from sharesd.loading.resolve import ResolvedConfig
from sharesd.sampling_params import SamplingParams
from sharesd.weights.offloaded_decoder import OffloadedBlocks
from sharesd.weights.quant_tuning_cache import cpu_name
from sharesd_files import JsonCache


def costs_file(
    resolved: ResolvedConfig,
    mode: str,
    params: SamplingParams,
    *,
    widths: Sequence[int] | None,
    streamed: OffloadedBlocks | None,
) -> JsonCache:
    """Return the cache of costs of a mode's rounds."""
    config, plan, device = resolved.config, resolved.plan, resolved.device
    options = replace(config, target=None, mode=NAIVE, draft=None, max_queue=None, prefill_chunk=None)
    # Drafts take as long on any disk, and steps do not: costs of one that is half as fast again are others.
    transfer = plan and plan.offloads and round(2 * math.log2(plan.transfer_s))
    gpu = (torch.cuda.get_device_name(device), gemm_config.kernels_version()) if device.type == "cuda" else None
    what = (
        *(__version__, torch.__version__, resolved.folder.resolve(), resolved.dtype, resolved.compile),
        *(widths, mode, options, second_model(config)),
        *(cpu_name(), STEP_THREADS.max_size, device, kernels_version()),
        streamed and (streamed.stream.blocks, len(streamed.stream.slots)),
        *(transfer, gpu),
        replace(params, seed=0, max_new_tokens=1, stop=(), stop_token_ids=(), ignore_eos=False, logit_bias={}),
    )
    return JsonCache("settings", "costs", what)
