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
from benchmark.studies.widening import GROUP, describe, wide_tensors
from sharesd.config import EngineConfig, Mode, SamplingParams, SplitConfig
from sharesd.load import Runtime
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.resolve import resolve
from sharesd.models.weights import decoder_config

LONG, SHORT = 8192, 2048


def measure(job: Job, size: str) -> None:
    """Plain steps, share and costs, with a profile; then plain steps of any width, and in a long cache."""
    _measure_exact(job, size)
    if job.has_time(60):
        _measure_naive(job, size, "not exact", exact=False)
    if size == "7b" and job.has_time(60):
        slots = LONG if job.on_gpu else SHORT
        _measure_naive(job, size, f"{slots} slots", max_context=slots)


def _measure_exact(job: Job, size: str) -> None:
    with job.part("exact"), widened_model(job, size, ("naive", "share")) as runtime:
        compare_modes(job, runtime, ("naive", "share"), ["T=0", "T=1"], prompts=3, tokens=128, label="exact")
        with job.part("profile"):
            engine = runtime.engine("naive")
            steps = SamplingParams(max_new_tokens=17, ignore_eos=True)
            prompt = prompts_of(runtime, 1)[0]
            engine.generate([prompt], steps)
            profile(job, lambda: engine.generate([prompt], steps))
            job.put(profiled="a prompt and 16 plain steps")


def _measure_naive(job: Job, size: str, label: str, *, exact: bool = True, max_context: int = SHORT) -> None:
    with job.part(label), widened_model(job, size, ("naive",), exact=exact, max_context=max_context) as runtime:
        compare_modes(job, runtime, ("naive",), ["T=0"], prompts=2, tokens=128, label=label)


def compare(job: Job, modes: str, size: str = "7b") -> None:
    """Two modes prompt by prompt: the second should be nowhere slower than the first."""
    first, second = cast("list[Mode]", modes.split(","))
    with widened_model(job, size, (first, second)) as runtime:
        found = compare_modes(job, runtime, (first, second), ["T=0"], prompts=8, tokens=128)
        ratios = [b / a for a, b in zip(found[first, "T=0"].speeds, found[second, "T=0"].speeds, strict=True)]
        job.put(least_gain=min(ratios), gains=[{"prompt": i, second: ratio} for i, ratio in enumerate(ratios)])
        engine, params = runtime.engine(second), SamplingParams(max_new_tokens=1)
        for length in (33, 70, 150, 310) if job.on_gpu else (33,):  # none of them seen before
            answer(engine, [[1 + i % 50 for i in range(length)]], params)
            job.add("prompts", {"tokens": length, "first token, ms": 1e3 * engine.stats.prefill_s})


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
    source = resolve(job.target)
    shape = SHAPES[size] if job.on_gpu else _next_larger(decoder_config(source))
    name = source.name if job.target else "SmolLM2-135M-Instruct"
    name = f"{name} widened to {size.upper() if job.on_gpu else 'a little more'}"
    job.put(model=name)
    with tempfile.TemporaryDirectory() as folder:
        describe(source, Path(folder), shape, name=name)
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
