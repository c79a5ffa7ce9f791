"""`serve --exact`: test that concurrent requests do not change any text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmark.serve.client import PATHS, Endpoint, RequestFailed, events, http_client
from benchmark.serve.workload import departures, random_words

LONGEST = 1500  # words of the one long prompt; each is a token or more
GIVEN_UP = 0.25  # clients that hang up, for each one that does not
IDLE_S = 5.0  # seconds after the last answer within which rows must be free
GAUGES = ("sharesd:num_requests_running", "sharesd:num_requests_waiting", "sharesd:kv_cache_usage_perc")


@dataclass(slots=True)
class AnswerChoice:
    """Text and end of a choice."""

    text: str = ""
    finish_reason: str | None = None


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Result of one load, compared with the texts of mode naive."""

    mode: str
    order: int  # number of the arrival order
    num_choices: int  # of clients that stay
    num_given_up: int
    num_identical: int = 0
    differing: list[str] = field(default_factory=list)  # texts of clients that hung up must be a beginning
    failures: list[str] = field(default_factory=list)  # requests without a whole answer
    left: dict[str, float] = field(default_factory=dict)  # gauges that are not at 0 afterwards

    @property
    def good(self) -> bool:
        """True for identical texts, no failed request and all gauges at 0."""
        return not (self.differing or self.failures or self.left)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixed:
    """Request without `stream` and `speculate`, which may not change its texts."""

    endpoint: Endpoint
    body: dict[str, Any]


def mixed(num: int, seed: int, longest: int = LONGEST) -> list[Mixed]:
    """Return seeded requests: one long text, about a third with shared prefix."""
    random = Random(seed)
    words = random_words(num + 1, longest // 8, 1, 0.96, seed)
    shared, *texts = [request.prompt for request in words]
    texts[random.randrange(num)] = random_words(1, longest, 1, 0.0, seed + 1)[0].prompt
    return [_request(f"{shared}\n{text}" if random.random() < 1 / 3 else text, random) for text in texts]


def _request(text: str, random: Random) -> Mixed:
    body: dict[str, Any] = {
        "seed": random.randrange(2**32),
        "temperature": random.choice([0, 0, 0.5, 1, 1.5]),
        "max_tokens": random.randint(4, 64),
        "ignore_eos": random.random() < 0.8,
        "n": 2 if random.random() < 0.2 else 1,
    }
    optional: dict[str, list[Any]] = {
        "top_p": [0.8, 0.95],
        "top_k": [5, 40],
        "min_p": [0.05],
        "repetition_penalty": [1.1, 1.3],
        "presence_penalty": [0.5, 1.5],
        "frequency_penalty": [0.5, -0.3],
        "logit_bias": [{"260": -100, "28": 3}],
        "stop": [[" the"], [".", "and "]],
    }
    for name, values in optional.items():
        if random.random() < 0.25:
            body[name] = random.choice(values)
    if random.random() < 0.5:
        more = {"logprobs": True, "top_logprobs": 3} if random.random() < 0.2 else {}
        return Mixed(endpoint="chat", body={"messages": [{"role": "user", "content": text}], **body, **more})
    return Mixed(endpoint="completions", body={"prompt": text, **body})


async def alone(url: str, requests: Sequence[Mixed], timeout_s: float) -> list[list[AnswerChoice]]:
    """Return each request's choices, sent one by one; Failed if rejected."""
    async with http_client(url, {}, timeout_s) as http:
        return [await _ask(http, request, stream=False, speculate=False) for request in requests]


async def together(
    url: str,
    requests: Sequence[Mixed],
    expected: Sequence[Sequence[AnswerChoice]],
    *,
    mode: str,
    order: int,
    rate: float,
    timeout_s: float,
) -> Outcome:
    """Send the requests concurrently, in the random order of seed `order`.

    A share GIVEN_UP is sent once more by clients that disconnect after 1 to 4 events.
    """
    random = Random(order)
    numbers = list(range(len(requests)))
    leaving = random.sample(numbers, round(GIVEN_UP * len(numbers)))
    visits = [(i, False) for i in numbers] + [(i, True) for i in leaving]
    random.shuffle(visits)
    outcome = Outcome(mode=mode, order=order, num_choices=sum(map(len, expected)), num_given_up=len(leaving))

    async def visit(i: int, leaves: bool, due_s: float, stream: bool, speculate: bool, pieces: int | None) -> None:
        await asyncio.sleep(due_s)
        try:
            choices = await _ask(http, requests[i], stream=stream, speculate=speculate, pieces=pieces)
        except (RequestFailed, httpx.HTTPError) as error:
            outcome.failures.append(f"request {i}: {error or type(error).__name__}")
            return
        for k, (wanted, given) in enumerate(zip(expected[i], choices, strict=True)):
            same = wanted.text.startswith(given.text) if leaves else wanted == given
            outcome.num_identical += same and not leaves
            if not same:
                outcome.differing.append(f"request {i}, choice {k}: {given} instead of {wanted}")

    async with http_client(url, {}, timeout_s) as http:
        async with asyncio.TaskGroup() as group:
            for (i, leaves), due_s in zip(visits, departures(len(visits), rate, 1.0, order), strict=True):
                stream, speculate = random.random() < 0.5, random.random() < 0.8
                pieces = random.randint(1, 4) if leaves else None
                group.create_task(visit(i, leaves, due_s, stream or leaves, speculate, pieces))
        outcome.left = await _left(http)
    return outcome


async def _ask(
    http: httpx.AsyncClient, request: Mixed, *, stream: bool, speculate: bool, pieces: int | None = None
) -> list[AnswerChoice]:
    """Return an answer's choices, or the texts after `pieces` events."""
    body = {**request.body, "stream": stream, "speculate": speculate}
    choices = [AnswerChoice() for _ in range(body["n"])]
    async with http.stream("POST", PATHS[request.endpoint], json=body) as response:
        if response.status_code != 200 or not stream:
            whole = json.loads(await response.aread())
            if response.status_code != 200:
                raise RequestFailed("rejected", f"{response.status_code}: {whole['error']['message']}")
            for choice in whole["choices"]:
                text = choice["message"]["content"] if request.endpoint == "chat" else choice["text"]
                choices[choice["index"]] = AnswerChoice(text, choice["finish_reason"])
            return choices
        async for data in events(response):
            if data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed("error in stream", event["error"]["message"])
            for choice in event["choices"]:
                part = choices[choice["index"]]
                part.text += choice["delta"]["content"] if request.endpoint == "chat" else choice["text"]
                part.finish_reason = choice["finish_reason"]
            if pieces is not None:
                pieces -= 1
                if not pieces:
                    break
    return choices


async def _left(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the gauges that are not at 0 after IDLE_S."""
    limit = monotonic() + IDLE_S
    while True:
        families = text_string_to_metric_families((await http.get("/metrics")).text)
        values = {family.name: family.samples[0].value for family in families if family.name in GAUGES}
        left = {name: values.get(name, float("nan")) for name in GAUGES if values.get(name) != 0}
        if not left or monotonic() > limit:
            return left
        await asyncio.sleep(0.05)
