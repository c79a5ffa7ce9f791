"""transformers' `generate`: plain, with an assistant model, with prompt lookup."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from benchmark.peers.protocol import Sample, Settings, TokenClock
from compile.native import cache_root
from quant.attach import Solving, quantized_copy
from sharesd.models.quiet import quiet_transformers
from sharesd.models.resolve import resolve

LOOKUP_TOKENS = 10
"""What the library's documentation uses for prompt lookup."""


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

    def prepare(self, variant: str) -> None:
        """The options of `generate` that make the variant."""
        if variant == "assisted":
            self._options[variant] = {"assistant_model": self._assistant()}
        else:
            self._options[variant] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if variant == "lookup" else {}

    def generate(self, variant: str, prompt: list[int]) -> Sample:
        """One answer, timed by the streamer."""
        num_tokens = self._settings.num_tokens
        ids_1T = torch.tensor([prompt], device=self._device)
        with quiet_transformers():
            clock = TokenClock()
            self._model.generate(
                ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                do_sample=False,
                max_new_tokens=num_tokens,
                pad_token_id=0,
                streamer=_Streamer(clock),
                **self._options[variant],
            )
        return clock.sample(num_tokens)

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
    """transformers hands it the prompt first, then the tokens of each step."""

    def __init__(self, clock: TokenClock) -> None:
        self._clock = clock
        self._saw_prompt = False

    def put(self, ids: Tensor) -> None:
        if self._saw_prompt:
            self._clock.add(ids.flatten().tolist())
        self._saw_prompt = True

    def end(self) -> None:
        pass


def _layer_of(path: str) -> int | None:
    found = re.search(r"\.(\d+)\.", path)
    return int(found[1]) if found else None


open_peer = TransformersPeer
