"""HTTP client for streamed answers: chunk times, texts and failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import httpx

from benchmark.serve.workload import LoadRequest

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(kw_only=True, slots=True)
class Answer:
    """Outcome of a request, with times in seconds."""

    sent_s: float = 0.0  # departure since the load began
    chunks_s: list[float] = field(default_factory=list)
    """Seconds from sending to each chunk with choices, role-only first chunks excluded."""
    text: str = ""
    num_ids: int = 0  # token ids in the chunks, if the server sends them
    prompt_tokens: int | None = None  # count of the server
    output_tokens: int | None = None  # count of the server, else of ids
    failure: str | None = None  # kind of failure; None: a whole answer
    detail: str = ""

    @property
    def ttft_s(self) -> float:
        return self.chunks_s[0]

    @property
    def e2el_s(self) -> float:
        """Time from the request to the last chunk."""
        return self.chunks_s[-1]


class RequestFailed(Exception):
    """Failure of a request, with its kind.

    Kinds are refused (429, 503), rejected, server error, error in stream, disconnected and no answer.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def http_client(base_url: str, headers: Mapping[str, str], timeout_s: float) -> httpx.AsyncClient:
    """Return a client without connection limits and proxies.

    Either would add waiting time to the measured latencies. ValueError for a URL or header that cannot be sent.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        return httpx.AsyncClient(
            base_url=base_url.rstrip("/").removesuffix("/v1"),
            headers=dict(headers),
            timeout=timeout_s,
            limits=limits,
            trust_env=False,
        )
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ValueError(f"--base-url {base_url} or a --header cannot be sent ({error}); correct it") from error


async def first_model(http: httpx.AsyncClient, url: str) -> str:
    """Return the first model of /v1/models; ValueError if there is none."""
    try:
        answer = await http.get("/v1/models")
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = [*str(error).splitlines(), type(error).__name__][0]
        raise ValueError(f"cannot ask {url} for its models ({why}); start the server or correct --base-url") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{url} lists no model at /v1/models; pass one with --model") from error


async def send_all(
    http: httpx.AsyncClient,
    endpoint: Endpoint,
    requests: Sequence[LoadRequest],
    due_s: Sequence[float],
    *,
    body: Callable[[int], Mapping[str, Any]],
    timeout_s: float,
    max_concurrency: int | None = None,
    done: Callable[[int], None] = lambda num: None,
) -> tuple[list[Answer], float]:
    """Send requests at times `due_s`; return answers and seconds until the last."""
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    answers = [Answer() for _ in requests]
    began, num_done = perf_counter(), 0

    async def send(i: int) -> None:
        nonlocal num_done
        await asyncio.sleep(due_s[i] - (perf_counter() - began))
        async with places:
            answers[i].sent_s = perf_counter() - began
            await _ask(http, endpoint, requests[i], f"sharesd-bench-{i}", body(i), answers[i], timeout_s)
        num_done += 1
        done(num_done)

    async with asyncio.TaskGroup() as group:
        for i in range(len(requests)):
            group.create_task(send(i))
    return answers, perf_counter() - began


async def _ask(
    http: httpx.AsyncClient,
    endpoint: Endpoint,
    request: LoadRequest,
    name: str,
    extra: Mapping[str, Any],
    answer: Answer,
    timeout_s: float,
) -> None:
    asked: dict[str, Any] = {"prompt": request.prompt, "max_tokens": request.output_len}
    if endpoint == "chat":
        messages = [{"role": "user", "content": request.prompt}]
        asked = {"messages": messages, "max_completion_tokens": request.output_len}
    body = {**asked, "stream": True, "stream_options": {"include_usage": True}, **extra}
    sent = perf_counter()
    try:
        async with (
            asyncio.timeout(timeout_s),
            http.stream("POST", PATHS[endpoint], json=body, headers={"x-request-id": name}) as response,
        ):
            if response.status_code != 200:
                raise _refusal(response.status_code, await response.aread())
            await _read(response, answer, sent)
    except RequestFailed as error:
        answer.failure, answer.detail = error.kind, str(error)
    except (TimeoutError, httpx.TimeoutException):
        answer.failure, answer.detail = "timeout", f"no complete answer within {timeout_s:g} s"
    except httpx.ConnectError as error:
        answer.failure, answer.detail = "unreachable", str(error)
    except httpx.HTTPError as error:
        answer.failure, answer.detail = "disconnected", str(error) or type(error).__name__
    if answer.failure is None and answer.output_tokens is None:
        answer.output_tokens = answer.num_ids or None


async def _read(response: httpx.Response, answer: Answer, sent: float) -> None:
    """Read a stream to its end; Failed if it is not whole."""
    finished = False
    async for data in events(response):
        now = perf_counter() - sent
        if data == b"[DONE]":
            finished = True
            continue
        try:
            finished |= _add(json.loads(data), answer, now)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            shown = data[:80].decode(errors="replace")
            raise RequestFailed("error in stream", f"not an event of this protocol: {shown}") from error
    if not finished:
        raise RequestFailed("disconnected", "the stream ended without a finish reason")
    if not answer.chunks_s:
        raise RequestFailed("no answer", "the stream contained no token")


async def events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield server-sent events, split at line feeds only: JSON may hold U+2028."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _add(event: dict[str, Any], answer: Answer, now: float) -> bool:
    """Record an event; return True if it has the finish reason."""
    if event.get("error"):
        raise RequestFailed("error in stream", _message(event))
    if usage := event.get("usage"):
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if not event.get("choices"):
        return False
    choice = event["choices"][0]
    delta = choice.get("delta") or {}
    text = (delta.get("reasoning_content") or "") + (delta.get("content") or choice.get("text") or "")
    ended = choice.get("finish_reason") is not None
    opens = "role" in delta and not (text or ended or delta.get("tool_calls"))  # it names the role: no token yet
    if answer.chunks_s or not opens:
        answer.chunks_s.append(now)
    answer.text += text
    answer.num_ids += len(choice.get("token_ids") or choice.get("tokens") or ())
    return ended


def _refusal(status: int, body: bytes) -> RequestFailed:
    try:
        message = _message(json.loads(body))
    except (ValueError, AttributeError, RecursionError):
        message = body.decode(errors="replace")
    kind = "refused" if status in (429, 503) else "rejected" if status < 500 else "server error"
    return RequestFailed(kind, f"{status}: {' '.join(message.split())[:200]}")


def _message(event: dict[str, Any]) -> str:
    error = event.get("error", event)
    return str(error.get("message", error) if isinstance(error, dict) else error)
