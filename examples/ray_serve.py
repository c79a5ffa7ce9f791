"""Ray Serve: as many replicas of the engine behind one address as its load asks for.

    pip install '.[ray]'
    serve run examples.ray_serve:app
    curl -d '{"prompt": "Why is the sky blue?", "max_new_tokens": 64, "seed": 1}' localhost:8000

For one machine `sharesd serve` speaks OpenAI's protocol and needs no Ray.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray import serve
from starlette.requests import Request

from sharesd import LLM, SamplingParams

AT_ONCE = 8
"""Requests that a replica decodes together."""


@serve.deployment(
    max_ongoing_requests=2 * AT_ONCE,
    autoscaling_config={"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": AT_ONCE},
    ray_actor_options={"num_cpus": 1},  # on GPUs: {"num_gpus": 1}
)
class Answerer:
    """One model, which threads share."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.llm, self.threads = LLM(**options), ThreadPoolExecutor(2 * AT_ONCE)

    async def __call__(self, request: Request) -> dict[str, Any]:
        return await self.answer(await request.json())

    async def answer(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Requests of one moment are decoded together: each text is what it would be alone."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, self.decode, fields)

    def decode(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The answer, or why there is none."""
        try:
            asked = [{"role": "user", "content": fields.pop("prompt")}]
            answer = self.llm.chat(asked, SamplingParams(**fields))
        except (KeyError, TypeError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"text": answer.text, "finish_reason": answer.finish_reason}


app = Answerer.bind({"mode": "hybrid", "max_batch": AT_ONCE})  # type: ignore[attr-defined]
