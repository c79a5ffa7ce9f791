"""OpenVINO GenAI: plain, with an int4 draft model, with prompt lookup. Reads Llama checkpoints by way of GGUF."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from benchmark.peers.gguf_export import WeightType, gguf_file
from benchmark.peers.protocol import Batch, Sample, Settings, TokenClock
from compile.cpp_extension import cache_root
from sharesd.models.hub import resolve

LOOKUP_TOKENS, LOOKUP_NGRAM = 5, 3
"""What the library's sample for prompt lookup uses."""
DRAFT_TOKENS = 5
"""What its sample for draft models uses; taken where ShareSD chooses its own lengths."""

_PRECISIONS: dict[str, tuple[str, WeightType]] = {
    "bfloat16": ("bf16", "F16"),
    "float16": ("f16", "F16"),
    "float32": ("f32", "F32"),
}
"""dtype -> precision of computing, and of stored weights (the GGUF reader knows no bfloat16)."""


class OpenVinoPeer:
    """One pipeline per variant."""

    def __init__(self, settings: Settings) -> None:
        """Raises ValueError for dtypes and devices which this runtime does not have."""
        import openvino_genai

        if settings.dtype not in _PRECISIONS:
            raise ValueError(f"OpenVINO does not compute in {settings.dtype}")
        if settings.config.device.startswith("cuda"):
            raise ValueError("OpenVINO has no CUDA devices; compare it with --device cpu")
        self._library, self._settings = openvino_genai, settings
        precision, self._stored = _PRECISIONS[settings.dtype]
        self._options = {"INFERENCE_NUM_THREADS": settings.num_threads, "INFERENCE_PRECISION_HINT": precision}
        self._pipelines: dict[str, Any] = {}

    def prepare(self, variant: str) -> None:
        """Convert what is needed and load the pipeline."""
        library, folder = self._library, resolve(self._settings.config.target)
        scheduler = library.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = self._settings.config.planned_context  # prompts in one piece
        extra: dict[str, Any] = {}
        if variant == "draft":
            extra["draft_model"] = library.draft_model(_model_folder(library, folder, "Q4_0"), "CPU", **self._options)
        elif variant == "lookup":
            extra["prompt_lookup"] = True
        self._pipelines[variant] = library.ContinuousBatchingPipeline(
            _model_folder(library, folder, self._stored), scheduler, "CPU", {**self._options, **extra}
        )

    def generate(self, variant: str, batch: Batch) -> Sample:
        """The answers, timed step by step."""
        import numpy as np
        from openvino import Tensor

        config = self._library.GenerationConfig()
        config.do_sample = False
        config.ignore_eos = True
        config.max_new_tokens = self._settings.num_tokens
        if variant == "draft":
            config.num_assistant_tokens = self._settings.config.num_draft or DRAFT_TOKENS
        elif variant == "lookup":
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, LOOKUP_NGRAM
        pipeline, clock = self._pipelines[variant], TokenClock(batch)
        handles = [
            pipeline.add_request(row, Tensor(np.array([ids], dtype=np.int64)), config) for row, ids in enumerate(batch)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for row, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        clock.add(output.generated_ids, row)
        return clock.sample(self._settings.num_tokens)


def _model_folder(library: Any, folder: Path, weights: WeightType) -> Path:
    """The checkpoint in OpenVINO's own format, converted now if that was not done before."""
    source = gguf_file(folder, weights)
    home = cache_root() / "openvino"
    converted = home / f"{source.stem}-{library.get_version()}"
    if not converted.exists():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix="partial-") as scratch:
            fresh = Path(scratch) / "model"
            fresh.mkdir()
            link = fresh / source.name
            link.symlink_to(source.resolve())
            library.LLMPipeline(link, "CPU", enable_save_ov_model=True)  # writes its format beside the file
            link.unlink()
            os.replace(fresh, converted)
    return converted


open_peer = OpenVinoPeer
