"""ShareSD itself, asked like the others."""

from __future__ import annotations

import torch

from benchmark.peers.catalogue import OURS, RUNTIMES
from benchmark.peers.protocol import Batch, Sample, Settings, TokenClock
from sharesd.config import SamplingParams
from sharesd.engine.engine import Engine
from sharesd.runtime import Runtime


class Ours:
    """All modes on one loaded target."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.num_threads)
        self._num_tokens = settings.num_tokens
        self._runtime = Runtime(settings.config, modes=tuple(RUNTIMES[OURS].variants))  # type: ignore[arg-type]
        self._engines: dict[str, Engine] = {}

    def prepare(self, variant: str) -> None:
        """Compile and warm up a mode."""
        self._engines[variant] = self._runtime.engine(variant)  # type: ignore[arg-type]

    def generate(self, variant: str, batch: Batch) -> Sample:
        """The answers, decoded together."""
        params = SamplingParams(max_new_tokens=self._num_tokens, ignore_eos=True)
        clock = TokenClock(batch)
        for chunk in self._engines[variant].stream(batch, params):
            clock.add(chunk.token_ids, chunk.row)
        return clock.sample(self._num_tokens)


open_peer = Ours
