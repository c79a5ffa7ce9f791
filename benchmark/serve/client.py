"""One streamed answer of a server: when its pieces came, what they said, and how it went wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, get_args

import httpx

from benchmark.serve.workload import Request

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
Failure = Literal[
    "refused", "rejected", "server error", "timeout", "unreachable", "disconnected", "error in stream", "no answer"
]
"""Kinds: 429 or 503; another status from 400 on; from 500 on; ...; an `error` event; an end without a token."""
FAILURES: tuple[Failure, ...] = get_args(Failure)
OVERLOAD = (429, 503)


@dataclass(kw_only=True, slots=True)
class Answer:
    """What became of a request. Times are in seconds."""

    due_s: float = 0.0
    """When it should have left, since the load began."""
    sent_s: float = 0.0
    """When it left: later where --max-concurrency held it back."""
    chunks_s: list[float] = field(default_factory=list)
    """When each chunk with choices came, since it was sent. A chunk may hold many tokens."""
    text: str = ""
    num_ids: int = 0
    """Token ids that came along, where the server sends them."""
    prompt_tokens: int | None = None
    """As the server counts."""
    output_tokens: int | None = None
    """As the server counts; None where it does not."""
    failure: Failure | None = None
    """None: a whole answer."""
    detail: str = ""
    """What the server said of a failure."""

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.chunks_s[0]

    @property
    def e2el_s(self) -> float:
        """Time from the request to the last chunk with choices."""
        return self.chunks_s[-1]


class Failed(Exception):
    """Why there is no whole answer."""

    def __init__(self, kind: Failure, detail: str) -> None:
        super().__init__(detail)
        self.kind: Failure = kind


class Client:
    """Asks one server. Proxies of the environment are not used: a proxy's times would be measured with it."""

    def __init__(
        self,
        base_url: str,
        endpoint: Endpoint,
        *,
        options: Mapping[str, Any],
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        """`options` is what every request says beside its prompt and length; `timeout_s` bounds a whole answer."""
        self._endpoint, self._options, self._timeout_s = endpoint, options, timeout_s
        self._url = base_url.rstrip("/").removesuffix("/v1")
        try:
            self._http = httpx.AsyncClient(
                base_url=self._url,
                headers=dict(headers),
                timeout=timeout_s,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                trust_env=False,
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ValueError(f"--base-url {base_url} or a --header cannot be sent ({error}); correct it") from error

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def first_model(self) -> str:
        """The first model that the server names; ValueError where it names none or cannot be reached."""
        url = self._url
        try:
            answer = await self._http.get("/v1/models")
            return str(answer.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"cannot ask {url} for its models ({why}); start the server or correct --base-url"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{url} names no model at /v1/models; name one with --model") from error

    async def metrics(self) -> str | None:
        """The text of /metrics; None where the server has none."""
        try:
            answer = await self._http.get("/metrics")
        except httpx.HTTPError:
            return None
        return answer.text if answer.status_code == 200 else None

    async def ask(self, request: Request, name: str, extra: Mapping[str, Any], answer: Answer) -> None:
        """Send a request and fill in its answer, or its failure. `extra` is what this request says of its own."""
        body = self._body(request, extra)
        sent = perf_counter()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.stream("POST", PATHS[self._endpoint], json=body, headers={"x-request-id": name}) as response,
            ):
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
                await _read(response, answer, sent)
        except Failed as error:
            answer.failure, answer.detail = error.kind, str(error)
        except (TimeoutError, httpx.TimeoutException):
            answer.failure, answer.detail = "timeout", f"no whole answer within {self._timeout_s:g} s"
        except httpx.ConnectError as error:
            answer.failure, answer.detail = "unreachable", str(error)
        except httpx.HTTPError as error:
            answer.failure, answer.detail = "disconnected", str(error) or type(error).__name__

    def _body(self, request: Request, extra: Mapping[str, Any]) -> dict[str, Any]:
        asked: dict[str, Any]
        if self._endpoint == "chat":
            messages = [{"role": "user", "content": request.prompt}]
            asked = {"messages": messages, "max_completion_tokens": request.output_len}
        else:
            asked = {"prompt": request.prompt, "max_tokens": request.output_len}
        return {**asked, "stream": True, "stream_options": {"include_usage": True}, **extra, **self._options}


async def _read(response: httpx.Response, answer: Answer, sent: float) -> None:
    """A stream to its end, so that its connection can be used again; Failed where it is not whole."""
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
            raise Failed("error in stream", f"no event of this protocol: {shown}") from error
    if not finished:
        raise Failed("disconnected", "the stream ended without a finish reason")
    if not answer.chunks_s:
        raise Failed("no answer", "the stream held no token")


async def events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of server-sent events, one line each, as OpenAI's protocol has them.

    httpx's own lines also end at U+2028 and its like, which JSON may hold.
    """
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _add(event: dict[str, Any], answer: Answer, now: float) -> bool:
    """Take note of an event; True if it says why the answer ended."""
    if event.get("error"):
        raise Failed("error in stream", _message(event))
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


def _refusal(status: int, body: bytes) -> Failed:
    kind: Failure = "refused" if status in OVERLOAD else "rejected" if status < 500 else "server error"
    try:
        said = _message(json.loads(body))
    except (ValueError, AttributeError, RecursionError):
        said = body.decode(errors="replace")
    return Failed(kind, f"{status}: {' '.join(said.split())[:200]}")


def _message(event: dict[str, Any]) -> str:
    error = event.get("error", event)
    return str(error.get("message", error) if isinstance(error, dict) else error)
