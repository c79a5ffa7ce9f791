"""Routes `POST /v1/messages` and `POST /v1/messages/count_tokens`, in Anthropic's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from serve.choice_state import Choice
from serve.errors import ApiError
from serve.messages import for_template
from serve.routes.answer_blocks import Block, events, whole
from serve.routes.anthropic_schemas import CountBody, MessagesBody
from serve.routes.chat import ChatFormat, chat_call, encode_body
from serve.routes.generation import served_name
from serve.schemas import ChatBody, read
from serve.usage import usage
from sharesd.models.tokenizer import Tokenizer

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


async def messages(request: Request) -> Response:
    """Handle `POST /v1/messages`."""
    given = await read(request, MessagesBody)
    body = given.as_chat()
    call = await chat_call(request, body)
    service = request.app.state.service
    name = served_name(service, body.model)
    dialect = Messages(request.state.visit.id, name, call.model.tokenizer, body, call.choices[0])
    form = ChatFormat(call.model, body)
    if body.stream:
        stream = events(call, form, dialect, patience=service.settings.keep_alive)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})
    await call.finish()
    blocks, choice, reason = whole(call, form)
    warnings = {"warnings": call.warnings} if call.warnings else {}
    return JSONResponse(dialect.message(blocks, choice, reason) | warnings)


async def count_tokens(request: Request) -> JSONResponse:
    """Handle `POST /v1/messages/count_tokens`."""
    body = (await read(request, CountBody)).as_chat()
    service = request.app.state.service
    served_name(service, body.model)
    ids = await run_in_threadpool(encode_body, service.ready_model(), body, for_template(body.messages))
    return JSONResponse({"input_tokens": len(ids)})


class Messages:
    """Answer to one request, whole or as events."""

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, body: ChatBody, choice: Choice) -> None:
        self._id, self._model, self._tokenizer = f"msg_{request_id}", model, tokenizer
        self._stops, self._choice = body.stop or [], choice

    def message(self, blocks: list[Block], choice: Choice, reason: str | None) -> dict[str, Any]:
        """Return the whole answer."""
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        content = [_content(block) for block in blocks]
        return {**head, "content": content, **self._ending(choice, reason), "usage": _usage(choice)}

    def begin(self) -> Iterator[dict[str, Any]]:
        message = self.message([], self._choice, None)
        yield {"type": "message_start", "message": message | {"stop_reason": None}}

    def change(self, what: str, block: Block, text: str) -> Iterator[dict[str, Any]]:
        match what, block.kind:
            case "open", _:
                empty = Block(block.kind, block.index, "", block.name, block.call_id)
                yield {"type": "content_block_start", "index": block.index, "content_block": _content(empty)}
            case "close", _:
                yield {"type": "content_block_stop", "index": block.index}
            case _, kind:
                name, key = {
                    "text": ("text_delta", "text"),
                    "call": ("input_json_delta", "partial_json"),
                    "reasoning": ("thinking_delta", "thinking"),
                }[kind]
                yield {"type": "content_block_delta", "index": block.index, "delta": {"type": name, key: text}}

    def end(self, blocks: list[Block], choice: Choice, reason: str | None) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": self._ending(choice, reason), "usage": _usage(choice)}
        yield {"type": "message_stop"}

    def error(self, error: ApiError) -> dict[str, Any]:
        return error.anthropic_body

    def _ending(self, choice: Choice, reason: str | None) -> dict[str, Any]:
        found = self._stop_found(choice) if reason == "stop" else None
        name = "stop_sequence" if found else STOP_REASONS.get(reason or "", "end_turn")
        return {"stop_reason": name, "stop_sequence": found}

    def _stop_found(self, choice: Choice) -> str | None:
        """Return the stop text that ended an answer, or None."""
        text = self._tokenizer.decode(choice.token_ids)
        places = [(text.find(stop), stop) for stop in self._stops if stop in text[len(choice.text) :]]
        return min(places)[1] if places else None


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
    given = _object(block.text)
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}


def _object(text: str) -> dict[str, Any]:
    """Return arguments as an object; an empty one if they were cut."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


def _usage(choice: Choice) -> dict[str, Any]:
    counts = usage([choice])
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts["completion_tokens"],
    }
