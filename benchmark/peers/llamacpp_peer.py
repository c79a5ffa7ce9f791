"""llama.cpp by its Python package: plain, with prompt lookup, and several sequences in one context. Reads Llama
checkpoints by way of GGUF.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from benchmark.peers.gguf_export import WeightType, gguf_file
from benchmark.peers.protocol import Batch, Sample, Settings, TokenClock, require_alone
from sharesd.models.hub import resolve

LOOKUP_TOKENS = 2
"""What the package's documentation advises on CPU."""

_WEIGHTS: dict[str, WeightType] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_STORED: dict[str, WeightType] = {"f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
"""Variant -> weights other than those of the dtype."""


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
        weights = _STORED.get(variant, _WEIGHTS[settings.dtype])
        if variant not in ("plain", "lookup"):
            file = gguf_file(resolve(settings.config.target), weights)
            self._contexts[variant] = _Sequences(self._library, file, settings)
            return
        require_alone(settings, "Llama.generate")
        draft = None
        if variant == "lookup":
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
        self._contexts[variant] = self._library.Llama(
            str(gguf_file(resolve(settings.config.target), weights)),
            n_ctx=settings.config.planned_context,
            n_threads=settings.num_threads,
            n_threads_batch=settings.num_threads,
            logits_all=draft is not None,  # drafts are checked against them
            draft_model=draft,
            verbose=False,
        )

    def generate(self, variant: str, batch: Batch) -> Sample:
        """The answers, timed as they come out."""
        context, num_tokens = self._contexts[variant], self._settings.num_tokens
        clock = TokenClock(batch)
        if isinstance(context, _Sequences):
            context.answer(batch, num_tokens, clock)
        else:
            context.reset()  # else the beginning that this prompt shares with the last one would be reused
            for token in islice(context.generate(batch[0], temp=0.0), num_tokens):
                clock.add([int(token)])
        return clock.sample(num_tokens)


class _Sequences:
    """The C interface, through which a context holds several sequences that are decoded together."""

    def __init__(self, library: Any, file: Path, settings: Settings) -> None:
        config = settings.config
        library.llama_backend_init()
        model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
        params = library.llama_context_default_params()
        params.n_ctx, params.n_seq_max = config.planned_context * config.max_batch, config.max_batch
        params.n_threads = params.n_threads_batch = settings.num_threads
        self._library, self._most = library, int(params.n_batch)
        self._context = model and library.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not open {file.name}")
        self._batch = library.llama_batch_init(self._most, 0, 1)
        self._greedy = library.llama_sampler_init_greedy()

    def answer(self, batch: Batch, num_tokens: int, clock: TokenClock) -> None:
        """Read the prompts one after another, as many tokens at once as the library takes; then all go on together."""
        library = self._library
        library.llama_memory_clear(library.llama_get_memory(self._context), True)
        rows = range(len(batch))
        read = ((row, at, ids[at], at == len(ids) - 1) for row, ids in enumerate(batch) for at in range(len(ids)))
        last: dict[int, int] = {}
        while part := list(islice(read, self._most)):
            last |= self._decode(part, clock)
        for n in range(num_tokens - 1):
            last = self._decode(((row, len(batch[row]) + n, last[row], True) for row in rows), clock)

    def _decode(self, tokens: Iterable[tuple[int, int, int, bool]], clock: TokenClock) -> dict[int, int]:
        """One call with (row, position, token, whether the next one is asked for); row -> its next token."""
        library, batch = self._library, self._batch
        asked = {}
        batch.n_tokens = 0
        for row, at, token, wanted in tokens:
            i = batch.n_tokens
            batch.token[i], batch.pos[i], batch.logits[i] = token, at, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.n_tokens += 1
            if wanted:
                asked[row] = i
        status = library.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        found = {row: int(library.llama_sampler_sample(self._greedy, self._context, i)) for row, i in asked.items()}
        for row, token in found.items():
            clock.add([token], row)
        return found


open_peer = LlamaCppPeer
