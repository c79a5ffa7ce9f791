"""OpenVINO GenAI: plain and with prompt lookup, from GGUF."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from benchmark.peers.peer import Deliver, Peer, PeerSettings
from sharesd_files import cache_root, file_identity, scratch_folder

LOOKUP_TOKENS, LOOKUP_NGRAM = 5, 3  # from the library's sample for prompt lookup
PRECISIONS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class OpenVino(Peer):
    """OpenVINO GenAI with one pipeline per variant."""

    package, pip = "openvino_genai", "openvino-genai"
    variants = {
        "plain": "ContinuousBatchingPipeline",
        "lookup": f"prompt_lookup: {LOOKUP_TOKENS} tokens after {LOOKUP_NGRAM}-grams",
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
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, LOOKUP_NGRAM
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
