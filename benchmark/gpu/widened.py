"""The embedded model widened to true sizes, its weights made on the device and never written: real text, real costs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from benchmark.gpu.modes import answer, compare_modes, loaded, profile, prompts_of
from benchmark.gpu.worker import Job
from benchmark.studies.wide_shapes import SHAPES, Shape
from benchmark.studies.widening import GROUP, describe, wide_tensors, widen_head
from sharesd.config import EMBEDDED_HEADS, EngineConfig, Mode, SamplingParams, SplitConfig
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime

LONG, SHORT = 8192, 2048


def measure(job: Job, size: str, modes: str) -> None:
    """Modes prompt by prompt: none should be slower than plain decoding anywhere."""
    known = (mode for mode in modes.split(",") if mode != "eagle" or not job.target)  # of others there is no head
    asked = cast("tuple[Mode, ...]", tuple(known))
    with job.part(modes), widened_model(job, size, asked) as runtime:
        found = compare_modes(job, runtime, asked, ["T=0"], prompts=4, tokens=128)
        for mode in asked[1:]:
            speeds = zip(*(found[name, "T=0"].speeds for name in (mode, asked[0])), strict=True)
            gains = [speed / plain for speed, plain in speeds]
            job.add("gains", {"mode": mode, **{f"prompt {i}": gain for i, gain in enumerate(gains, 1)}})


def measure_more(job: Job, size: str) -> None:
    """Work of the device in plain steps; steps of any width; a long cache; prompts of lengths that are new."""
    with job.part("profile"), widened_model(job, size, ("naive",)) as runtime:
        engine, steps = runtime.engine("naive"), SamplingParams(max_new_tokens=17, ignore_eos=True)
        prompt = prompts_of(runtime, 1)[0]
        engine.generate([prompt], steps)
        profile(job, lambda: engine.generate([prompt], steps))
        job.put(profiled="a prompt and 16 plain steps")
        for length in (33,) if job.tiny else (33, 70, 150, 310):
            answer(engine, [[1 + i % 50 for i in range(length)]], SamplingParams(max_new_tokens=1))
            job.add("prompts", {"tokens": length, "first token, ms": 1e3 * engine.stats.prefill_s})
    long = SHORT if job.tiny else LONG
    ways: dict[str, dict[str, Any]] = {"not exact": {"exact": False}, f"{long} slots": {"max_context": long}}
    for label, options in ways.items():
        if job.has_time(40):
            with job.part(label), widened_model(job, size, ("naive",), label=label, **options) as runtime:
                compare_modes(job, runtime, ("naive",), ["T=0"], prompts=2, tokens=128, label=label)


def in_stages(job: Job, size: str) -> None:
    """The model in two stages on the one device, beside the model as it is: the same texts, nearly as fast."""
    split = SplitConfig(devices=(job.device,) * 2)
    ways: dict[str, dict[str, Any]] = {"whole": {}, "2 stages": {"split": split, "device": "auto"}}
    found = {}
    for label, options in ways.items():
        with widened_model(job, size, ("naive", "share"), label=label, **options) as runtime:
            found[label] = compare_modes(job, runtime, ("naive", "share"), ["T=0"], prompts=3, tokens=128, label=label)
    for mode in ("naive", "share"):
        whole, staged = (answers[mode, "T=0"] for answers in found.values())
        speed = staged.together.tokens_per_second / whole.together.tokens_per_second
        job.add("stages", {"mode": mode, "identical": staged.token_ids == whole.token_ids, "x whole": speed})


@contextmanager
def widened_model(
    job: Job,
    size: str,
    modes: tuple[Mode, ...],
    *,
    label: str = "",
    exact: bool = True,
    max_context: int = SHORT,
    **options: Any,
) -> Iterator[Runtime]:
    """A model of this size, on a CPU the smallest that there is; `options` are those of the runtime."""
    source = job.source()
    shape = _next_larger(decoder_config(source)) if job.tiny else SHAPES[size]
    name = source.name if job.target else "SmolLM2-135M-Instruct"
    name = f"{name} widened to {'a little more' if job.tiny else size.upper()}"
    job.put(model=name)
    with tempfile.TemporaryDirectory() as folder:
        describe(source, Path(folder), shape, name=name)
        if "eagle" in modes:
            widen_head(EMBEDDED_HEADS / "eagle", source, Path(folder) / "head", shape)
            options["heads"] = (f"{folder}/head",)
        options = {"device": job.device, "exact": exact, "max_context": max_context, **options}
        config = EngineConfig(target=folder, **options)
        tensors = partial(wide_tensors, source, shape, device=job.device)
        label = label or f"{', '.join(modes)}{'' if exact else ', not exact'}, {max_context} slots"
        with loaded(job, config, modes, tensors, label) as runtime:
            yield runtime


def _next_larger(config: DecoderConfig) -> Shape:
    """The smallest shape that widening can make of a model, to try it out."""
    return Shape(
        hidden_size=config.hidden_size + GROUP,
        mlp_size=config.mlp_size + GROUP,
        num_heads=2 * config.num_heads,
        num_kv_heads=2 * config.num_kv_heads,
        num_layers=len(config.layers) + 1,
    )
