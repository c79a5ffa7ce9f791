"""What users have instead, on the same card in the same run; and our server under load."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmark.gpu.modes import prompts_of
from benchmark.gpu.widened import name_of, shape_of
from benchmark.gpu.worker import Job, NotHere
from benchmark.studies.widening import describe, wide_tensors, widen
from sharesd.models.tokenizer import load_tokenizer

USERS = (1, 8)


def transformers_config(folder: Path) -> Any:
    """Return transformers' config of a widened model.

    It refuses a hidden size that is no multiple of the number of heads, though `head_dim` is given and its models have
    such sizes; that is checked when a config is made, so the number is set after that.
    """
    import transformers

    values = json.loads((folder / "config.json").read_text())
    heads, values["num_attention_heads"] = values["num_attention_heads"], 1
    config: Any = transformers.AutoConfig.for_model(**values)
    config.num_attention_heads = heads
    return config


def measure_transformers(job: Job, size: str) -> None:
    """Time transformers' `generate` with a static cache, whose steps it compiles on a GPU.

    The model, its weights and the prompts are those of step `7b`. Tokens per second are of the steps after the first
    token, as our modes count them.
    """
    import transformers

    source, tokens, prompts = job.source(), 8 if job.tiny else 128, 1 if job.tiny else 2
    shape = shape_of(job, source, size)
    with tempfile.TemporaryDirectory() as folder:
        describe(source, Path(folder), shape, name=name_of(job, size))
        config = transformers_config(Path(folder))
        with torch.device(job.device):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        asked = prompts_of(load_tokenizer(Path(folder)), prompts)
    weights = dict(model.named_parameters())  # tied ones once
    with torch.no_grad():
        for name, tensor in wide_tensors(source, shape, device=job.device):
            weights.pop(name).copy_(tensor)
    assert not weights, f"no values for {', '.join(weights)}"

    def seconds(prompt: list[int], *, first_alone: bool) -> float:
        ids = torch.tensor([prompt], device=job.device)
        stops = [lambda ids, scores: torch.ones(len(ids), dtype=torch.bool, device=ids.device)] if first_alone else []
        started = time.perf_counter()
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            cache_implementation="static",
            stopping_criteria=transformers.StoppingCriteriaList(stops),
            pad_token_id=0,
        )
        assert found.shape[1] == len(prompt) + (1 if first_alone else tokens), found.shape
        return time.perf_counter() - started

    job.put(model=name_of(job, size), package=f"transformers {transformers.__version__}")
    for number, prompt in enumerate(asked, 1):
        for first_alone in (False, True):
            started = time.perf_counter()
            seconds(prompt, first_alone=first_alone)  # compiles
            job.put(warm_up_s=time.perf_counter() - started)
        whole, first = seconds(prompt, first_alone=False), seconds(prompt, first_alone=True)
        job.add(
            "peer",
            {"prompt": f"prompt {number}", "first token, ms": 1e3 * first, "tok/s": (tokens - 1) / (whole - first)},
        )
    speeds = [row["tok/s"] for row in job.table("peer")]
    job.put(tokens_per_second=len(speeds) / sum(1 / speed for speed in speeds))


def measure_server(job: Job, size: str) -> None:
    """Load our server with one user and with eight; the model is written to the disk for its process."""
    source, tokens = job.source(), 8 if job.tiny else 64
    try:
        import fastapi  # noqa: F401
        import httpx  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise NotHere(f"{error.name} is not installed; pip install {error.name}") from error
    from benchmark.serve import workload
    from benchmark.serve.load import LoadSettings, measure
    from benchmark.serve.spawn import spawned

    draw = workload.repeated(workload.questions(None, tokens))
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/model"
        widen(source, Path(target), shape_of(job, source, size), name=name_of(job, size))
        job.put(model=name_of(job, size), mode="share")
        flags = ["--target", target, "--device", job.device, "--max-batch", str(max(USERS)), "--max-context", "2048"]
        started = time.perf_counter()
        with spawned("share", flags) as url:
            job.put(ready_s=time.perf_counter() - started)
            for users in USERS:
                num, options = users if job.tiny else 3 * users, {"temperature": 0.0, "ignore_eos": True}
                settings = LoadSettings(draw=draw, num_prompts=num, max_concurrency=users, options=options)
                found = asyncio.run(measure(settings, url, rate=math.inf, mode="share")).result
                shown = {"tok/s": "output_throughput", "ttft, ms": "median_ttft_ms", "tpot, ms": "median_tpot_ms"}
                row = {"users": users, "done": f"{found['completed']} of {num}"}
                job.add("server", row | {name: found[key] for name, key in shown.items()})
