"""transformers: `generate` plain, with an assistant model, and with prompt lookup."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from benchmark.peers.peer import Deliver, Peer, PeerSettings
from sharesd_files import cache_root

LOOKUP_TOKENS = 10  # from the library's documentation


class Transformers(Peer):
    """Checkpoint as loaded by AutoModelForCausalLM, uncompiled."""

    package, pip = "transformers", "transformers"
    variants = {
        "plain": "generate()",
        "assisted": "assistant_model: a copy with quantized linears",
        "lookup": f"prompt_lookup_num_tokens={LOOKUP_TOKENS}",
    }

    def __init__(self, settings: PeerSettings) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from sharesd.models.hf import quiet_transformers
        from sharesd.models.hub import resolve_target

        super().__init__(settings)
        torch.set_num_threads(settings.num_threads)
        self._quiet, config = quiet_transformers, replace(settings.config, dequantize=True, target_quant=None)
        given = {"dtype": getattr(torch, settings.dtype), "trust_remote_code": config.trust_remote_code}
        with self._quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(resolve_target(config), **given)
        self._model = model.eval().to(config.device)
        self._model.generation_config.eos_token_id = None  # end tokens do not end an answer
        self._options: dict[str, dict[str, Any]] = {}

    def prepare(self, variant: str) -> None:
        self._options[variant] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if variant == "lookup" else {}
        if variant == "assisted":
            self._options[variant]["assistant_model"] = self._assistant()

    def answer(self, variant: str, prompt: list[int], deliver: Deliver) -> None:
        import torch

        ids = torch.tensor([prompt], device=self._model.device)
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": self.settings.num_tokens, "pad_token_id": 0}
        options |= {"attention_mask": torch.ones_like(ids), "streamer": _Streamer(deliver), **self._options[variant]}
        with self._quiet():
            self._model.generate(ids, **options)

    def _assistant(self) -> Any:
        """Return a copy of the model with mode share's quantized linears."""
        from quant.quantize_model import quantized_copy
        from quant.solved_linears import SolverConfig

        head = self._model.get_output_embeddings()
        copy, _ = quantized_copy(
            self._model,
            self.settings.config.quant,
            head_name=next(name for name, module in self._model.named_modules() if module is head),
            layer_of=lambda path: int(found[1]) if (found := re.search(r"\.(\d+)\.", path)) else None,
            solver_config=SolverConfig(cache_dir=cache_root() / "quant"),
        )
        return copy


class _Streamer:
    """Streamer of `generate` that delivers each step's tokens, without the prompt."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver, self._saw_prompt = deliver, False

    def put(self, ids: Any) -> None:
        if self._saw_prompt:
            self._deliver(ids.flatten().tolist())
        self._saw_prompt = True

    def end(self) -> None:
        pass
