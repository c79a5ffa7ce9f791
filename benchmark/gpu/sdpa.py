"""Library attention over a static cache with masks: which backends take it, what plans cost, speed, bits of rows."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmark.gpu.timing import seconds_per_call
from benchmark.gpu.worker import Job

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
HEADS = {"135m": (9, 3, 64), "7b": (66, 22, 64), "others": (32, 8, 128)}
"""Query heads, key/value heads, head size."""
STEPS, PROMPTS = (1, 5, 9, 16), (128, 200, 512)
"""New tokens of steps, and of pieces of a prompt."""


def measure(job: Job) -> None:
    """All backends for steps, then for prompts: 200 tokens after 128 show what another length costs."""
    heads, lengths = (HEADS, (2048, 8192)) if job.on_gpu else ({"tiny": (4, 2, 64)}, (256,))
    for model, (num_heads, num_kv, size) in heads.items():
        for slots in lengths:
            for name, backend in BACKENDS.items():
                with sdpa_kernel(backend):
                    _measure(job, model, name, num_heads, num_kv, size, slots)


def _measure(job: Job, model: str, backend: str, num_heads: int, num_kv: int, size: int, slots: int) -> None:
    dice = torch.Generator(job.device).manual_seed(0)

    def random(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, size, device=job.device, generator=dice).bfloat16()

    k, v, q = random(num_kv, slots), random(num_kv, slots), random(num_heads, max(PROMPTS))
    live = slots // 2

    def attend(tokens: int) -> Callable[[], Tensor]:
        places = torch.arange(tokens, device=job.device)[:, None] + live
        seen = torch.arange(slots, device=job.device)[None] <= places
        return lambda: F.scaled_dot_product_attention(q[:, :, :tokens], k, v, seen, enable_gqa=num_heads != num_kv)

    row: dict[str, object] = {"model": model, "backend": backend, "slots": slots}
    try:
        together = attend(max(STEPS))()
        differ = [t for t in STEPS if not torch.equal(attend(t)(), together[:, :, :t])]
        row["rows that differ"] = " ".join(map(str, differ)) or "none"
        row |= {f"us, {t} rows": 1e6 * seconds_per_call([attend(t)] * 10) for t in (1, max(STEPS))}
        for tokens in PROMPTS:
            row[f"ms, first of {tokens}"] = 1e3 * _first_call(attend(tokens), job.on_gpu)
        row[f"ms, {max(PROMPTS)}"] = 1e3 * seconds_per_call([attend(max(PROMPTS))] * 3)
    except RuntimeError as error:  # a backend that does not take this is a finding
        row["refused"] = str(error).strip().splitlines()[0][:100]
    job.add("backends", row)


def _first_call(call: Callable[[], object], on_gpu: bool) -> float:
    started = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started
