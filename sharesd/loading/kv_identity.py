"""Identity of KV: everything that its bits depend on, besides the tokens."""

from __future__ import annotations

import hashlib

import torch

from compile.cpp_extension import kernels_version
from compile.cuda import gemm_config
from sharesd import __version__
from sharesd.kvcache.static import StaticKVCache
from sharesd.loading.resolve import ResolvedConfig
from sharesd.models.checkpoint import content_hash
from sharesd.weights.quant_tuning_cache import cpu_name

FORMAT = 1
"""Version of the files of a prompt cache."""


def kv_identity(resolved: ResolvedConfig, cache: StaticKVCache, *, recompute_decoded_kv: bool) -> dict[str, str]:
    """Return the identity of a start's KV, by name."""
    config, device = resolved.config, resolved.device
    on_gpu = device.type == "cuda"
    kernels = (
        *(kernels_version(), resolved.compile, config.kernels, config.exact, recompute_decoded_kv),
        *((gemm_config.kernels_version(), config.steady_cublas) if on_gpu else ()),
    )
    weights = (content_hash(resolved.folder), config.dequantize or config.activations, config.ignore_keys)
    layout = [(tuple(tensor.shape[1:2]), tuple(tensor.shape[3:])) for tensor in (*cache.k, *cache.v)]
    return {
        "version": f"{__version__}, torch {torch.__version__}",
        "model": _digest(weights),
        "dtype": str(resolved.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "kernels": _digest(kernels),
        "KV format": _digest((FORMAT, layout, cache.taps)),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]
