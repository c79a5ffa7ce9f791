"""Measured runtimes: each is imported where its class is constructed, in a process of its own."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from sharesd.config import EngineConfig
from sharesd.sampling_params import SamplingParams
from sharesd_files import cache_root, file_identity, scratch_folder

PRECISIONS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}  # names in OpenVINO
Deliver = Callable[[Sequence[int]], None]  # takes tokens as they come out


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSettings:
    config: EngineConfig
    num_tokens: int  # tokens per answer, whatever end tokens come up
    num_threads: int
    modes: tuple[str, ...] = ()  # ours that are measured; () = all
    gguf: str | None = None  # file with the model's weights for runtimes that read GGUF

    @property
    def dtype(self) -> str:
        """Dtype in full, `auto` resolved as ShareSD does."""
        return "bfloat16" if self.config.dtype == "auto" else self.config.dtype

    def require_gguf(self, name: str) -> str:
        """Return the GGUF file; ValueError without one or on a GPU."""
        if self.config.device.startswith("cuda"):
            raise ValueError(f"{name} is measured on CPU only; compare it with --device cpu")
        if self.gguf is None:
            raise ValueError(f"{name} needs a GGUF file; pass these weights with --gguf FILE")
        return self.gguf


class Peer:
    """Runtime with variants of greedy decoding; constructors of subclasses import its libraries."""

    package: ClassVar[str]
    pip: ClassVar[str]  # name for pip install
    variants: ClassVar[dict[str, str]]  # name -> way of decoding; the first is plain decoding

    def __init__(self, settings: PeerSettings) -> None:
        """Load the model; ValueError for settings that the runtime does not support."""
        self.settings = settings

    def prepare(self, variant: str) -> None:
        """Load a variant; any error becomes the reason for its missing figures."""

    def answer(self, variant: str, prompt: list[int], deliver: Deliver) -> None:
        """Deliver `num_tokens` tokens without reuse of earlier prompts."""
        raise NotImplementedError

    @classmethod
    def missing(cls) -> str | None:
        """Return the pip command for a missing runtime, else None."""
        found = importlib.util.find_spec(cls.package) is not None
        return None if found else f"not installed: pip install {cls.pip}"


class ShareSD(Peer):
    """ShareSD's modes on one loaded target."""

    package, pip = "sharesd", "sharesd"
    variants = {
        "naive": "plain decoding",
        "share": "drafts by the target's quantized linears",
        "classic": "drafts by a second model",
        "suffix": "drafts by a suffix automaton of the text",
        "hybrid": "per round the best of its drafters",
    }

    def __init__(self, settings: PeerSettings) -> None:
        import torch

        from sharesd.llm import LLM

        super().__init__(settings)
        torch.set_num_threads(settings.num_threads)
        self._llm = LLM.from_config(settings.config, settings.modes or tuple(self.variants), reuse=False)

    def prepare(self, variant: str) -> None:
        self._llm.runtime.warm_up(variant)

    def answer(self, variant: str, prompt: list[int], deliver: Deliver) -> None:
        params = SamplingParams(max_new_tokens=self.settings.num_tokens, ignore_eos=True)
        for chunk in self._llm.stream(prompt, params, mode=variant):
            deliver(chunk.token_ids)


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

            draft = LlamaPromptLookupDecoding(num_pred_tokens=2)  # as documented, for CPUs
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


class OpenVino(Peer):
    """OpenVINO GenAI with one pipeline per variant."""

    package, pip = "openvino_genai", "openvino-genai"
    variants = {
        "plain": "ContinuousBatchingPipeline",
        "lookup": "prompt_lookup: 5 tokens after 3-grams",
    }

    def __init__(self, settings: PeerSettings) -> None:
        import openvino_genai

        super().__init__(settings)
        if settings.dtype not in PRECISIONS:
            raise ValueError(f"OpenVINO does not compute in {settings.dtype}")
        self._library, precision = openvino_genai, PRECISIONS[settings.dtype]
        self._folder = _converted(openvino_genai, Path(settings.require_gguf("OpenVINO")))
        self._options = {"INFERENCE_NUM_THREADS": settings.num_threads, "INFERENCE_PRECISION_HINT": precision}
        self._pipelines: dict[str, Any] = {}

    def prepare(self, variant: str) -> None:
        scheduler = self._library.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = self.settings.config.planned_context  # prompts in one piece
        options = {**self._options, **({"prompt_lookup": True} if variant == "lookup" else {})}
        self._pipelines[variant] = self._library.ContinuousBatchingPipeline(self._folder, scheduler, "CPU", options)

    def answer(self, variant: str, prompt: list[int], deliver: Deliver) -> None:
        import numpy as np
        from openvino import Tensor

        config = self._library.GenerationConfig()
        config.do_sample, config.ignore_eos, config.max_new_tokens = False, True, self.settings.num_tokens
        if variant == "lookup":
            config.num_assistant_tokens, config.max_ngram_size = 5, 3  # as in the library's sample
        pipeline = self._pipelines[variant]
        handle = pipeline.add_request(0, Tensor(np.array([prompt], dtype=np.int64)), config)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            if handle.can_read():
                for output in handle.read().values():
                    deliver(output.generated_ids)


def _converted(library: Any, source: Path) -> Path:
    """Return a GGUF file's folder in OpenVINO's format, converted once per version."""
    folder = cache_root() / "openvino"
    key = hashlib.sha256(repr((file_identity(source), library.get_version())).encode()).hexdigest()[:16]
    converted = folder / f"{source.stem}-{key}-{library.get_version()}"
    if not converted.exists():
        with scratch_folder(folder) as scratch:
            fresh = scratch / "model"
            fresh.mkdir()
            link = fresh / source.name
            link.symlink_to(source.resolve())
            library.LLMPipeline(link, "CPU", enable_save_ov_model=True)  # writes its format next to the file
            link.unlink()
            os.replace(fresh, converted)
    return converted


class Transformers(Peer):
    """Checkpoint as loaded by AutoModelForCausalLM, uncompiled."""

    package, pip = "transformers", "transformers"
    variants = {
        "plain": "generate()",
        "assisted": "assistant_model: a copy with quantized linears",
        "lookup": "prompt_lookup_num_tokens=10",
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
        self._options[variant] = {"prompt_lookup_num_tokens": 10} if variant == "lookup" else {}
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


PEERS: dict[str, type[Peer]] = {
    "sharesd": ShareSD,
    "transformers": Transformers,
    "openvino": OpenVino,
    "llamacpp": LlamaCpp,
}
"""Runtimes in the order of the table."""
