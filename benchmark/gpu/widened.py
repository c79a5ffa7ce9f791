"""Modes on the embedded model widened to 1B and 7B."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from benchmark.gpu.modes import answer, compare_modes, loaded
from benchmark.gpu.shapes import SHAPES, WideShape
from benchmark.gpu.worker import Job
from benchmark.studies.widening import GROUP, describe, wide_tensors, widen_head
from sharesd.config import EngineConfig, Mode, PipelineConfig
from sharesd.drafters.selection import EMBEDDED
from sharesd.llm import LLM
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.loader import decoder_config
from sharesd.sampling_params import SamplingParams

LONG, SHORT = 8192, 2048


def measure(job: Job, size: str, modes: str) -> None:
    """Compare modes prompt by prompt; none should be slower than plain decoding."""
    known = (mode for mode in modes.split(",") if mode != "eagle" or not job.target)  # other models have no head
    asked = cast("tuple[Mode, ...]", tuple(known))
    with job.part(modes), widened_model(job, size, asked) as llm:
        found = compare_modes(job, llm, asked, ["T=0"], prompts=4, tokens=128)
        for mode in asked[1:]:
            speeds = zip(*(found[name, "T=0"].speeds for name in (mode, asked[0])), strict=True)
            gains = {f"prompt {i}": speed / plain for i, (speed, plain) in enumerate(speeds, 1)}
            job.add("gains", {"mode": mode, **gains})


def measure_more(job: Job, size: str) -> None:
    """Time prefill of new prompt lengths, inexact steps, whole steps in one Inductor graph, and a long cache."""
    with job.part("prompts"), widened_model(job, size, ("naive",)) as llm:
        llm.runtime.warm_up("naive")
        for length in (33,) if job.tiny else (33, 70, 150, 310):
            found = answer(llm, "naive", [[1 + i % 50 for i in range(length)]], SamplingParams(max_new_tokens=1))
            job.add("prompts", {"tokens": length, "first token, ms": 1e3 * found.together.prefill_s})
    long = SHORT if job.tiny else LONG
    cases: dict[str, dict[str, Any]] = {
        "not exact": {"exact": False},
        "compile full": {"compile": "full"},
        f"{long} slots": {"max_context": long},
    }
    for label, options in cases.items():
        if job.has_time(40):
            with job.part(label), widened_model(job, size, ("naive",), label=label, **options) as llm:
                compare_modes(job, llm, ("naive",), ["T=0"], prompts=2, tokens=128, label=label)


def in_stages(job: Job, size: str) -> None:
    """Compare two pipeline stages on one device with the whole model."""
    split = PipelineConfig(devices=(job.device,) * 2)
    cases: dict[str, dict[str, Any]] = {"whole": {}, "2 stages": {"split": split, "device": "auto"}}
    found = {}
    for label, options in cases.items():
        with widened_model(job, size, ("naive", "share"), label=label, **options) as llm:
            found[label] = compare_modes(job, llm, ("naive", "share"), ["T=0"], prompts=3, tokens=128, label=label)
    for mode in ("naive", "share"):
        whole, staged = (answers[mode, "T=0"] for answers in found.values())
        speed = staged.together.tokens_per_second / whole.together.tokens_per_second
        job.add("stages", {"mode": mode, "identical": staged.token_ids == whole.token_ids, "x whole": speed})


@contextmanager
def widened_model(
    job: Job, size: str, modes: tuple[Mode, ...], *, label: str = "", exact: bool = True, **options: Any
) -> Iterator[LLM]:
    """Load the target widened to `size`; `options` are fields of EngineConfig."""
    source = job.source()
    shape, name = shape_of(job, source, size), name_of(job, size)
    job.put(model=name)
    with tempfile.TemporaryDirectory() as folder:
        describe(source, Path(folder), shape, name=name)
        if "eagle" in modes:
            widen_head(EMBEDDED / "eagle", source, Path(folder) / "head", shape)
            options["heads"] = (f"{folder}/head",)
        options = {"device": job.device, "exact": exact, "max_context": SHORT, **options}
        tensors = partial(wide_tensors, source, shape, device=job.device)
        label = label or f"{', '.join(modes)}{'' if exact else ', not exact'}, {options['max_context']} slots"
        with loaded(job, EngineConfig(target=folder, **options), modes, tensors, label) as llm:
            yield llm


def shape_of(job: Job, source: Path, size: str) -> WideShape:
    return _next_larger(decoder_config(source)) if job.tiny else SHAPES[size]


def name_of(job: Job, size: str) -> str:
    name = job.source().name if job.target else "SmolLM2-135M-Instruct"
    return f"{name} widened to {'a little more' if job.tiny else size.upper()}"


def _next_larger(config: DecoderConfig) -> WideShape:
    return WideShape(
        hidden_size=config.hidden_size + GROUP,
        intermediate_size=config.intermediate_size + GROUP,
        num_attention_heads=2 * config.num_attention_heads,
        num_key_value_heads=2 * config.num_key_value_heads,
        num_layers=len(config.layer_types) + 1,
    )
