"""Library attention over a static cache with masks: which backends take it, what plans cost, speed, bits of rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmark.gpu.timing import listed
from benchmark.gpu.worker import Job
from compile.cuda.timing import seconds_per_call

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
HEADS = {"7b": (66, 22, 64), "135m": (9, 3, 64), "others": (32, 8, 128)}
"""Query heads, key/value heads, head size."""
STEPS, PROMPTS = (1, 5, 9, 16), (128, 200, 512)
"""New tokens of steps, and of pieces of a prompt."""


def measure(job: Job) -> None:
    """All backends for steps, then for prompts: 200 tokens after 128 show what another length costs.

    Keys and values are repeated for each query head of a group, as the models do it, or shared by the library.
    """
    heads, lengths = (HEADS, (2048, 8192)) if job.on_gpu else ({"tiny": (4, 2, 64)}, (256,))
    for slots in lengths:
        for model, sizes in heads.items():
            for name, backend in BACKENDS.items():
                for shared in (False, True):
                    row = {"model": model, "slots": slots, "backend": name, "heads": "shared" if shared else "repeated"}
                    with job.part(" ".join(map(str, row.values()))), sdpa_kernel(backend):
                        job.add("backends", row | _figures(job, *sizes, slots, shared))


def _figures(job: Job, num_heads: int, num_kv: int, size: int, slots: int, shared: bool) -> dict[str, object]:
    dice = torch.Generator(job.device).manual_seed(0)

    def random(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, size, device=job.device, generator=dice).bfloat16()

    k, v, q = random(num_kv, slots), random(num_kv, slots), random(num_heads, max(PROMPTS))
    live = slots // 2

    def attend(tokens: int) -> Callable[[], Tensor]:
        places = torch.arange(tokens, device=job.device)[:, None] + live
        seen = torch.arange(slots, device=job.device)[None] <= places
        queries = q[:, :, :tokens]
        if shared:
            return lambda: F.scaled_dot_product_attention(queries, k, v, seen, enable_gqa=True)
        groups = num_heads // num_kv
        repeated = partial(torch.repeat_interleave, repeats=groups, dim=1)
        return lambda: F.scaled_dot_product_attention(queries, repeated(k), repeated(v), seen)

    row: dict[str, object] = {}
    try:
        together = attend(max(STEPS))()
        row["rows that differ"] = listed([t for t in STEPS if not torch.equal(attend(t)(), together[:, :, :t])])
        row |= {f"us, {t} rows": 1e6 * seconds_per_call([attend(t)] * 10) for t in (1, max(STEPS))}
        for tokens in PROMPTS:
            row[f"ms, first of {tokens}"] = 1e3 * _first_call(attend(tokens), job.on_gpu)
        row[f"ms, {max(PROMPTS)}"] = 1e3 * seconds_per_call([attend(max(PROMPTS))] * 3)
    except RuntimeError as error:  # a backend that does not take this is a finding
        if isinstance(error, torch.AcceleratorError):
            raise
        row["refused"] = str(error).strip().partition("\n")[0][:100]
    return row


def _first_call(call: Callable[[], object], on_gpu: bool) -> float:
    started = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started
