"""transformers: `generate` (plain, with an assistant model, with prompt lookup), and continuous batching."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from benchmark.peers.protocol import Batch, Sample, Settings, TokenClock, require_alone
from compile.cpp_extension import cache_root
from quant.quantize_model import Solving, quantized_copy
from sharesd.models.hub import resolve
from sharesd.models.quiet import quiet_transformers

LOOKUP_TOKENS = 10
"""What the library's documentation uses for prompt lookup."""
PAGE = 256
"""Tokens of a page of the KV cache in continuous batching: the library's own choice."""


class TransformersPeer:
    """The checkpoint as AutoModelForCausalLM loads it, uncompiled."""

    def __init__(self, settings: Settings) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.num_threads)
        self._settings, config = settings, settings.config
        self._device = torch.device(config.device)
        with quiet_transformers():
            model: Any = AutoModelForCausalLM.from_pretrained(
                resolve(config.target),
                dtype=getattr(torch, settings.dtype),
                trust_remote_code=config.trust_remote_code,
            )
        self._model = model.eval().to(self._device)
        self._model.generation_config.eos_token_id = None  # end tokens do not end an answer
        self._options: dict[str, dict[str, Any]] = {}
        self._manager: Any = None  # of continuous batching

    def prepare(self, variant: str) -> None:
        """The options of `generate` that make the variant."""
        options = self._options.setdefault(variant, {})
        if variant in ("assisted", "lookup"):
            require_alone(self._settings, "generate() with drafts")
        if variant == "assisted":
            options["assistant_model"] = self._assistant()
        elif variant == "lookup":
            options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS

    def generate(self, variant: str, batch: Batch) -> Sample:
        """The answers, timed by a streamer, or as continuous batching hands them out."""
        clock = TokenClock(batch)
        with quiet_transformers():
            if variant == "continuous":
                self._continuous(batch, clock)
            else:
                self._whole(batch, clock, self._options[variant])
        return clock.sample(self._settings.num_tokens)

    def _whole(self, batch: Batch, clock: TokenClock, options: dict[str, Any]) -> None:
        """All rows from the first to the last step; shorter prompts are padded on the left."""
        longest = max(map(len, batch))
        mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in batch], device=self._device)
        self._model.generate(
            torch.tensor([[0] * (longest - len(ids)) + ids for ids in batch], device=self._device),
            attention_mask=mask_BT,
            do_sample=False,
            max_new_tokens=self._settings.num_tokens,
            pad_token_id=0,
            streamer=_Streamer(clock, len(batch)),
            **options,
        )

    def _continuous(self, batch: Batch, clock: TokenClock) -> None:
        """Requests of the library's continuous batching, which streams each by itself."""
        if self._manager is None:
            self._manager = self._started_manager()
        names = self._manager.add_requests(batch, max_new_tokens=self._settings.num_tokens, streaming=True)
        rows = {name: row for row, name in enumerate(names)}
        num_seen = [0] * len(batch)
        num_running = len(batch)
        while num_running:
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("continuous batching has stopped")
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            row = rows[result.request_id]
            clock.add(result.generated_tokens[num_seen[row] :], row)
            num_seen[row] = len(result.generated_tokens)
            num_running -= result.is_finished()

    def _started_manager(self) -> Any:
        """Continuous batching with room for what is asked, and nothing shared between requests."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        config = self._settings.config
        manager = self._model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                PAGE,  # which had another name before transformers 5.23
                num_blocks=config.max_batch * (config.planned_context // PAGE + 2),
                max_batch_tokens=config.planned_context,
                max_requests_per_batch=config.max_batch,
                allow_block_sharing=False,
            ),
        )
        manager.start()
        return manager

    def _assistant(self) -> Any:
        """A copy with quantized linears, as ShareSD's drafter has them. The head stays full unless asked otherwise."""
        head = self._model.get_output_embeddings()
        twin, _ = quantized_copy(
            self._model,
            self._settings.config.quant,
            head_name=next(name for name, module in self._model.named_modules() if module is head),
            layer_of=_layer_of,
            solving=Solving(cache_dir=cache_root() / "quant"),
        )
        return twin


class _Streamer:
    """transformers hands it the prompts first, then the tokens of each step."""

    def __init__(self, clock: TokenClock, num_rows: int) -> None:
        self._clock, self._num_rows = clock, num_rows
        self._saw_prompts = False

    def put(self, ids: Tensor) -> None:
        if self._saw_prompts:
            for row, new in enumerate(ids.reshape(self._num_rows, -1).tolist()):
                self._clock.add(new, row)
        self._saw_prompts = True

    def end(self) -> None:
        pass


def _layer_of(path: str) -> int | None:
    found = re.search(r"\.(\d+)\.", path)
    return int(found[1]) if found else None


open_peer = TransformersPeer
