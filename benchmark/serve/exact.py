"""`serve --exact`: mixed requests come at random times, some clients hang up, and no text changes by it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from time import monotonic

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmark.serve.arrivals import departures
from benchmark.serve.client import PATHS, Failed, events
from benchmark.serve.mixed import Mixed

GIVEN_UP = 0.25
"""Clients that hang up, for each one that does not."""
IDLE_S = 5.0
"""Rows must be free so long after the last answer at most."""
GAUGES = ("sharesd:num_requests_running", "sharesd:num_requests_waiting", "sharesd:kv_cache_usage_perc")


@dataclass(slots=True)
class Said:
    """One choice."""

    text: str = ""
    finish_reason: str | None = None


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Of a load."""

    mode: str
    order: int
    """Which arrival order."""
    num_choices: int
    """Of clients that stay."""
    num_given_up: int
    num_identical: int = 0
    differing: list[str] = field(default_factory=list)
    """What differs, and how; of clients that hung up, what they got must be a beginning."""
    failures: list[str] = field(default_factory=list)
    """Requests without a whole answer."""
    left: dict[str, float] = field(default_factory=dict)
    """Gauges that are not at 0 afterwards."""

    @property
    def good(self) -> bool:
        """All is identical, and nothing is left."""
        return not (self.differing or self.failures or self.left)


async def alone(url: str, requests: Sequence[Mixed], timeout_s: float) -> list[list[Said]]:
    """The choices of each request, asked one by one. Failed where one has no answer."""
    async with _http(url, timeout_s) as http:
        return [await _ask(http, request, stream=False, speculate=False) for request in requests]


async def together(
    url: str,
    requests: Sequence[Mixed],
    expected: Sequence[Sequence[Said]],
    *,
    mode: str,
    order: int,
    rate: float,
    timeout_s: float,
) -> Outcome:
    """The requests in an order of their own, at random times, streamed and not, with drafts and without; clients that
    hang up among them.
    """
    dice = Random(order)
    numbers = list(range(len(requests)))
    leaving = dice.sample(numbers, round(GIVEN_UP * len(numbers)))
    visits = [(i, False) for i in numbers] + [(i, True) for i in leaving]
    dice.shuffle(visits)
    outcome = Outcome(mode=mode, order=order, num_choices=sum(map(len, expected)), num_given_up=len(leaving))

    async def visit(i: int, leaves: bool, due_s: float, stream: bool, speculate: bool, pieces: int | None) -> None:
        await asyncio.sleep(due_s)
        try:
            asked = _ask(
                http, requests[i], stream=stream or leaves, speculate=speculate, pieces=pieces if leaves else None
            )
            said = await asked
        except (Failed, httpx.HTTPError) as error:
            outcome.failures.append(f"request {i}: {error or type(error).__name__}")
            return
        for k, (wanted, given) in enumerate(zip(expected[i], said, strict=True)):
            same = wanted.text.startswith(given.text) if leaves else wanted == given
            outcome.num_identical += same and not leaves
            if not same:
                outcome.differing.append(f"request {i}, choice {k}: {given} instead of {wanted}")

    async with _http(url, timeout_s) as http:
        async with asyncio.TaskGroup() as group:
            for (i, leaves), due_s in zip(visits, departures(len(visits), rate, 1.0, order), strict=True):
                stream, speculate = dice.random() < 0.5, dice.random() < 0.8
                pieces = dice.randint(1, 4) if leaves else None
                group.create_task(visit(i, leaves, due_s, stream or leaves, speculate, pieces))
        outcome.left = await _left(http)
    return outcome


def _http(url: str, timeout_s: float) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url, timeout=timeout_s, limits=httpx.Limits(max_connections=None), trust_env=False
    )


async def _ask(
    http: httpx.AsyncClient, request: Mixed, *, stream: bool, speculate: bool, pieces: int | None = None
) -> list[Said]:
    """The choices; what there is after so many `pieces` of a stream, where the client hangs up."""
    body = {**request.body, "stream": stream, "speculate": speculate}
    said = [Said() for _ in range(body["n"])]
    async with http.stream("POST", PATHS[request.endpoint], json=body) as response:
        if response.status_code != 200 or not stream:
            whole = json.loads(await response.aread())
            if response.status_code != 200:
                raise Failed("rejected", f"{response.status_code}: {whole['error']['message']}")
            for choice in whole["choices"]:
                text = choice["message"]["content"] if request.endpoint == "chat" else choice["text"]
                said[choice["index"]] = Said(text, choice["finish_reason"])
            return said
        async for data in events(response):
            if data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise Failed("error in stream", event["error"]["message"])
            for choice in event["choices"]:
                part = said[choice["index"]]
                part.text += choice["delta"]["content"] if request.endpoint == "chat" else choice["text"]
                part.finish_reason = choice["finish_reason"]
            if pieces is not None:
                pieces -= 1
                if not pieces:
                    break
    return said


async def _left(http: httpx.AsyncClient) -> dict[str, float]:
    """Gauges that stay above 0."""
    limit = monotonic() + IDLE_S
    while True:
        families = text_string_to_metric_families((await http.get("/metrics")).text)
        values = {family.name: family.samples[0].value for family in families if family.name in GAUGES}
        left = {name: values.get(name, float("nan")) for name in GAUGES if values.get(name) != 0}
        if not left or monotonic() > limit:
            return left
        await asyncio.sleep(0.05)
