"""llama.cpp (package llama-cpp-python): plain and with prompt lookup, from GGUF."""

from __future__ import annotations

from itertools import islice
from typing import Any

from benchmark.peers.peer import Deliver, Peer, PeerSettings

LOOKUP_TOKENS = 2  # from the package's documentation, for CPUs


class LlamaCpp(Peer):
    """llama.cpp with one context per variant."""

    package, pip = "llama_cpp", "llama-cpp-python"
    variants = {"plain": "Llama.generate", "lookup": "LlamaPromptLookupDecoding"}

    def __init__(self, settings: PeerSettings) -> None:
        import llama_cpp

        super().__init__(settings)
        self._library, self._file = llama_cpp, settings.require_gguf("llama.cpp")
        self._contexts: dict[str, Any] = {}

    def prepare(self, variant: str) -> None:
        settings, draft = self.settings, None
        if variant == "lookup":
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
        self._contexts[variant] = self._library.Llama(
            self._file,
            n_ctx=settings.config.planned_context,
            n_threads=settings.num_threads,
            n_threads_batch=settings.num_threads,
            logits_all=draft is not None,  # drafts are checked against them
            draft_model=draft,
            verbose=False,
        )

    def answer(self, variant: str, prompt: list[int], deliver: Deliver) -> None:
        context = self._contexts[variant]
        context.reset()  # else the beginning that this prompt shares with the last one would be reused
        for token in islice(context.generate(prompt, temp=0.0), self.settings.num_tokens):
            deliver([int(token)])
