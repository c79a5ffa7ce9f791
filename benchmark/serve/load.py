"""All requests, each at its time, and so many at once as allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

from benchmark.serve.client import Answer, Client
from benchmark.serve.workload import Request


async def send_all(
    client: Client,
    requests: Sequence[Request],
    due_s: Sequence[float],
    *,
    extra: Callable[[int], Mapping[str, Any]],
    max_concurrency: int | None = None,
    done: Callable[[int], None] = lambda num: None,
) -> tuple[list[Answer], float]:
    """The answers in the order of the requests, and the seconds until the last was there.

    `extra` gives what the i-th request says of its own; `done` hears how many are answered.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    answers = [Answer(due_s=due) for due in due_s]
    began = perf_counter()
    num_done = 0

    async def ask(i: int) -> None:
        nonlocal num_done
        await asyncio.sleep(due_s[i] - (perf_counter() - began))
        async with places:
            answers[i].sent_s = perf_counter() - began
            await client.ask(requests[i], f"sharesd-bench-{i}", extra(i), answers[i])
        num_done += 1
        done(num_done)

    async with asyncio.TaskGroup() as group:
        for i in range(len(requests)):
            group.create_task(ask(i))
    return answers, perf_counter() - began
