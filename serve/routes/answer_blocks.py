"""Answers as blocks of reasoning, text and calls, for further APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from serve.async_engine import ServerCall
from serve.choice_state import Choice
from serve.errors import ApiError
from serve.routes.generation import KEEP_ALIVE, ResponseFormat, event_stream, part_of, warnings_of
from serve.schemas import ChatBody

Kind = Literal["reasoning", "text", "call"]


@dataclass
class AnswerBlock:
    """Part of an answer."""

    kind: Kind
    index: int
    text: str = ""
    """Text, or the arguments of a call as JSON."""
    name: str = ""
    call_id: str = ""


class Blocks:
    """Blocks of one answer, in order; the last one may be open."""

    def __init__(self) -> None:
        self.done: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None

    def feed(self, delta: Mapping[str, Any]) -> Iterator[tuple[Literal["open", "more", "close"], AnswerBlock, str]]:
        """Yield the blocks that open, grow and close by a chat's delta."""
        for kind, text in (("reasoning", delta.get("reasoning_content")), ("text", delta.get("content"))):
            if text:
                yield from self._grow(kind, text)  # type: ignore[arg-type]
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if "id" in call:
                yield from self.close()
                self._open = AnswerBlock("call", len(self.done), name=function["name"], call_id=call["id"])
                yield "open", self._open, ""
            yield from self._grow("call", function["arguments"])

    def close(self) -> Iterator[tuple[Literal["close"], AnswerBlock, str]]:
        """Yield the end of the open block, if there is one."""
        if self._open is not None:
            block, self._open = self._open, None
            self.done.append(block)
            yield "close", block, ""

    def _grow(self, kind: Kind, text: str) -> Iterator[tuple[Literal["open", "more", "close"], AnswerBlock, str]]:
        if self._open is None or self._open.kind != kind:
            yield from self.close()
            self._open = AnswerBlock(kind, len(self.done))
            yield "open", self._open, ""
        if text:
            self._open.text += text
            yield "more", self._open, text


class Dialect(Protocol):
    """Events and answers of an API."""

    def whole(self, blocks: list[AnswerBlock], choice: Choice, reason: str | None) -> dict[str, Any]: ...
    def begin(self) -> Iterator[dict[str, Any]]: ...
    def change(self, what: str, block: AnswerBlock, text: str) -> Iterator[dict[str, Any]]: ...
    def end(self, blocks: list[AnswerBlock], choice: Choice, reason: str | None) -> Iterator[dict[str, Any]]: ...
    def error(self, error: ApiError) -> dict[str, Any]: ...


async def respond(
    request: Request, call: ServerCall, body: ChatBody, form: ResponseFormat, dialect: Dialect
) -> Response:
    """Return the response to a started call, streamed or whole."""
    if body.stream:
        return event_stream(_block_events(call, form, dialect, patience=request.app.state.service.settings.keep_alive))
    await call.finish()
    [choice] = call.choices
    found, blocks = form.whole(choice), Blocks()
    message = found["message"]
    calls = [{**one, "index": index} for index, one in enumerate(message.get("tool_calls", ()))]
    for _ in chain(blocks.feed({**message, "tool_calls": calls}), blocks.close()):
        pass
    return JSONResponse(dialect.whole(blocks.done, choice, found["finish_reason"]) | warnings_of(call))


async def _block_events(
    call: ServerCall, form: ResponseFormat, dialect: Dialect, *, patience: float
) -> AsyncIterator[bytes]:
    """Yield a stream's bytes; a failure ends it with the dialect's error."""
    blocks, reason = Blocks(), None
    yield b"".join(named_event(data) for data in dialect.begin())
    try:
        async for outputs in call.rounds(patience):
            found: list[dict[str, Any]] = []
            for output in outputs:
                part = part_of(form, output)
                if part is not None:
                    reason = part["finish_reason"] or reason
                    for change in blocks.feed(part["delta"]):
                        found += dialect.change(*change)
            if found or not outputs:
                yield b"".join(map(named_event, found)) or KEEP_ALIVE
        last = [data for change in blocks.close() for data in dialect.change(*change)]
        last += dialect.end(blocks.done, call.choices[0], reason)
        yield b"".join(map(named_event, last))
    except ApiError as error:
        yield named_event(dialect.error(error))


def named_event(data: Mapping[str, Any]) -> bytes:
    """Return one event as bytes, with its type as its name."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"event: {data['type']}\ndata: {text}\n\n".encode()
