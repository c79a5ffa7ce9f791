"""llama.cpp by its Python package: plain, and with prompt lookup. Reads Llama checkpoints by way of GGUF."""

from __future__ import annotations

from itertools import islice
from typing import Any

from benchmark.peers.gguf_export import WeightType, gguf_file
from benchmark.peers.protocol import Sample, Settings, TokenClock
from sharesd.models.resolve import resolve

LOOKUP_TOKENS = 2
"""What the package's documentation advises on CPU."""

_WEIGHTS: dict[str, WeightType] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class LlamaCppPeer:
    """One context per variant."""

    def __init__(self, settings: Settings) -> None:
        """Raises ValueError for dtypes and devices which are not measured here."""
        import llama_cpp

        if settings.dtype not in _WEIGHTS:
            raise ValueError(f"llama.cpp has no weights in {settings.dtype}")
        if settings.config.device.startswith("cuda"):
            raise ValueError("llama.cpp is measured on CPU only; compare it with --device cpu")
        self._library, self._settings = llama_cpp, settings
        self._contexts: dict[str, Any] = {}

    def prepare(self, variant: str) -> None:
        """Convert the checkpoint where that was not done before, and open it."""
        settings = self._settings
        draft = None
        if variant == "lookup":
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
        file = gguf_file(resolve(settings.config.target), _WEIGHTS[settings.dtype])
        self._contexts[variant] = self._library.Llama(
            str(file),
            n_ctx=settings.config.max_context,
            n_threads=settings.num_threads,
            n_threads_batch=settings.num_threads,
            logits_all=draft is not None,  # drafts are checked against them
            draft_model=draft,
            verbose=False,
        )

    def generate(self, variant: str, prompt: list[int]) -> Sample:
        """One answer, timed as the generator yields."""
        context, num_tokens = self._contexts[variant], self._settings.num_tokens
        context.reset()  # else the beginning that this prompt shares with the last one would be reused
        clock = TokenClock()
        for token in islice(context.generate(prompt, temp=0.0), num_tokens):
            clock.add([int(token)])
        return clock.sample(num_tokens)


open_peer = LlamaCppPeer
