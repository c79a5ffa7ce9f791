"""Server-sent events, one or more per round."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from serve.async_engine import Call, Output
from serve.errors import ApiError
from serve.routes.response_format import ResponseFormat
from serve.schemas import Generation
from serve.usage import ending, usage

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


async def events(
    call: Call,
    form: ResponseFormat,
    head: Mapping[str, Any],
    body: Generation,
    *,
    first: Mapping[str, Any],
    patience: float,
) -> AsyncIterator[bytes]:
    """Yield a stream's bytes: events of each round, and keep-alive comments.

    `first` is added to the first event.
    A comment is sent after `patience` seconds without output. After a failure, an error event ends the stream.
    """
    nothing_yet = {"usage": None} if body.wants_usage else {}
    more, num_sent = dict(first), 0
    try:
        async for outputs in call.rounds(patience):
            parts = [part_of(form, output) for output in outputs]
            num_sent += sum(len(output.chunk.token_ids) for output in outputs)
            so_far = {"usage": usage(call.choices, num_sent)} if body.wants_usage_always else nothing_yet
            found = [{**head, "choices": [part], **so_far} for part in parts if part is not None]
            data = [event(more | one) if place == 0 else event(one) for place, one in enumerate(found)]
            more = {} if data else more
            if data or not outputs:
                yield b"".join(data) or KEEP_ALIVE
        if body.wants_usage:
            yield event({**head, "choices": [], **ending(call.choices, body)})
    except ApiError as error:
        yield event(error.body)
    yield DONE


def part_of(form: ResponseFormat, output: Output) -> dict[str, Any] | None:
    """Return an output's choice of a chunk; None without news.

    An error event follows the tokens before a failure, in place of a finish reason.
    """
    chunk = output.chunk
    if chunk.error is None:
        return form.part(output.choice, chunk)
    part = form.part(output.choice, chunk) if chunk.token_ids or chunk.text else None
    return part and {**part, "finish_reason": None}


def event(data: Mapping[str, Any]) -> bytes:
    """Return one event as bytes."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
