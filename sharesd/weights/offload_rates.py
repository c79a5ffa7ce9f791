"""What offload plans assume: times of products, and acceptance in earlier answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile.block_linear import BlockPart, block_sizes
from quant.config import QuantConfig
from quant.quantized_weight import QuantizedWeight
from sharesd.engine.stats import Stats
from sharesd.models.checkpoint import identity
from sharesd.weights.backend import WeightBackend
from sharesd_files import JsonCache

PROBE_BYTES, PROBED_BYTES = 2**25, 2**27
"""Bytes of a timed matrix, and of its copies, which exceed caches."""


class StepTimer:
    """Timer of products, in seconds per byte of weights read from memory."""

    def __init__(self, backend: WeightBackend, dtype: torch.dtype, num_inputs: int, kind: str | None = None) -> None:
        """`kind`: GGML type of full-precision linears; None: numbers."""
        self._backend, self._dtype, self._kind = backend, dtype, kind
        outputs = max(64, PROBE_BYTES // (num_inputs * dtype.itemsize) // 64 * 64)
        self._shape = outputs, num_inputs

    def full(self, rows: Sequence[int]) -> list[float]:
        """Return seconds per byte of a full-precision linear, by number of rows."""
        packed = self._full_linear() if self._kind is None else self._stored_linear(self._kind)
        return [self._seconds_per_byte(packed, num) for num in rows]

    def quantized(self, quant: QuantConfig, bits: int, rows: int) -> float:
        return self._seconds_per_byte(self._quantized_linear(quant, bits), rows)

    def _full_linear(self) -> nn.Module:
        (N, K), device = self._shape, self._backend.device
        linear = nn.Linear(K, N, bias=False, device="meta")
        linear.weight = nn.Parameter(torch.ones(N, K, dtype=self._dtype, device=device), requires_grad=False)
        return self._backend.pack(linear)

    def _stored_linear(self, kind: str) -> nn.Module:
        """Return a linear with codes of zeros."""
        (N, K), (inputs, num_bytes) = self._shape, block_sizes(kind)
        return self._backend.stored_linear(BlockPart(kind, torch.zeros(N, K // inputs * num_bytes, dtype=torch.uint8)))

    def _quantized_linear(self, quant: QuantConfig, bits: int) -> nn.Module:
        """Return a linear with equal codes, without solving."""
        (N, K), device, form = self._shape, self._backend.device, quant.format
        group = form.group(K, bits, quant.group_size)
        if form.solver is not None:
            scale, q = torch.ones(N, K // group, device=device), torch.ones(N, K, dtype=torch.uint8, device=device)
            weight = QuantizedWeight(q=q, scale=scale, zero=scale, bits=bits, group_size=group)
            return self._backend.quantized_linear(weight, form)
        weight_NK = torch.ones(N, K, dtype=self._dtype, device=device)
        return form.linear("a linear", weight_NK, None, bits=bits, group_size=group, dtype=self._dtype, device=device)

    def _seconds_per_byte(self, linear: nn.Module, rows: int) -> float:
        num_bytes = sum(tensor.nbytes for tensor in (*linear.parameters(), *linear.buffers()))
        copies = [linear, *(copy.deepcopy(linear) for _ in range(PROBED_BYTES // num_bytes - 1))]
        x_MK = torch.ones(rows, self._shape[1], dtype=self._dtype, device=self._backend.device)
        with torch.inference_mode():
            return self._backend.time_calls([partial(each, x_MK) for each in copies]) / num_bytes


MAX_TRIES = 2000.0
"""Maximum weight of the evidence, in draft tokens; older tokens fade."""


def load_acceptance(folder: Path, mode: str, quant: QuantConfig, top: int) -> tuple[float, float]:
    """Return numbers of verified and accepted tokens, or levels of trees (`top`)."""
    return _read(_cache(folder, mode, quant, top))


def acceptance_recorder(folder: Path, mode: str, quant: QuantConfig, top: int) -> Callable[[Stats], None]:
    """Return a function that adds an answer's counts."""
    cache = _cache(folder, mode, quant, top)

    def keep(stats: Stats) -> None:
        fresh = stats.sources["accepted"] + stats.sources["recovered"], stats.sources["accepted"]
        if not fresh[0]:
            return
        tries, accepted = _read(cache)
        fading = min(1.0, max(0.0, MAX_TRIES - fresh[0]) / tries) if tries else 0.0
        cache.keep({"tries": fading * tries + fresh[0], "accepted": fading * accepted + fresh[1]})

    return keep


def _cache(folder: Path, mode: str, quant: QuantConfig, top: int) -> JsonCache:
    return JsonCache("settings", "acceptance", (identity(folder), mode, quant, top))


def _read(cache: JsonCache) -> tuple[float, float]:
    return cache.load(_counts) or (0.0, 0.0)


def _counts(found: Any) -> tuple[float, float]:
    tries, accepted = float(found["tries"]), float(found["accepted"])
    if not 0 <= accepted <= tries:
        raise ValueError(f"{accepted} of {tries} tokens were accepted")
    return tries, accepted
