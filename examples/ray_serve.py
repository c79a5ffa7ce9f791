"""Ray Serve: as many replicas of the engine behind one address as its load asks for.

    pip install '.[ray]'
    serve run examples.ray_serve:app
    curl -d '{"prompt": "Why is the sky blue?", "max_new_tokens": 64, "seed": 1}' localhost:8000

For one machine `python -m serve` speaks OpenAI's protocol and needs no Ray.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray import serve
from starlette.requests import Request

from sharesd import EngineConfig, SamplingParams, build

AT_ONCE = 8
"""Requests that a replica decodes together."""


@serve.deployment(
    max_ongoing_requests=2 * AT_ONCE,
    autoscaling_config={"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": AT_ONCE},
    ray_actor_options={"num_cpus": 1},  # on GPUs: {"num_gpus": 1}
)
class Answerer:
    """One engine, which belongs to one thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.engine = self.thread.submit(build, config).result()

    async def __call__(self, request: Request) -> dict[str, Any]:
        return await self.answer(await request.json())

    @serve.batch(max_batch_size=AT_ONCE, batch_wait_timeout_s=0.01)
    async def answer(self, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Requests of one moment, decoded together: each text is what it would be alone."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.decode, asked)

    def decode(self, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        by_request = {}
        for fields in asked:
            try:
                prompt = self.engine.tokenizer.ask(fields.pop("prompt"))
                answers.append(by_request.setdefault(self.engine.add(prompt, SamplingParams(**fields)), {"text": ""}))
            except (KeyError, TypeError, ValueError) as error:
                answers.append({"error": f"{type(error).__name__}: {error}"})
        while any(request.finish_reason is None for request in by_request):
            for chunk in self.engine.step():
                answer = by_request[chunk.request]
                answer["text"] += chunk.text
                answer["finish_reason"] = chunk.finish_reason
        return answers


app = Answerer.bind(EngineConfig(mode="hybrid", max_batch=AT_ONCE))
