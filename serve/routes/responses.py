"""Route `POST /v1/responses`, OpenAI's newer API, without stored state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from serve.choice_state import Choice
from serve.errors import ApiError
from serve.middleware import RequestState
from serve.routes.answer_blocks import Block, events, whole
from serve.routes.chat import ChatFormat, chat_call
from serve.routes.generation import served_name
from serve.routes.responses_schemas import ResponsesBody
from serve.schemas import read
from serve.usage import usage


async def responses(request: Request) -> Response:
    """Handle `POST /v1/responses`."""
    given = await read(request, ResponsesBody)
    body = given.as_chat()
    call = await chat_call(request, body)
    service = request.app.state.service
    dialect = Responses(request.state.visit, served_name(service, body.model), given, call.choices[0])
    form = ChatFormat(call.model, body)
    if body.stream:
        stream = events(call, form, dialect, patience=service.settings.keep_alive)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})
    await call.finish()
    warnings = {"warnings": call.warnings} if call.warnings else {}
    return JSONResponse(dialect.response(*whole(call, form)) | warnings)


class Responses:
    """Answer to one request, whole or as events."""

    def __init__(self, visit: RequestState, model: str, body: ResponsesBody, choice: Choice) -> None:
        self._id, self._model, self._body, self._choice = visit.id, model, body, choice
        self._created, self._number = visit.created, -1

    def response(self, blocks: list[Block], choice: Choice | None, reason: str | None) -> dict[str, Any]:
        """Return the whole answer; without a reason it is in progress."""
        body, cut = self._body, reason == "length"
        status = "in_progress" if reason is None else "incomplete" if cut else "completed"
        form = body.text.format if body.text else None
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": [self._item(block, self._status(blocks, block, cut)) for block in blocks],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": None, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if choice is None else _usage(choice),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _status(self, blocks: list[Block], block: Block, cut: bool) -> str:
        return "incomplete" if cut and block is blocks[-1] else "completed"

    def begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self.response([], None, None))

    def change(self, what: str, block: Block, text: str) -> Iterator[dict[str, Any]]:
        place = {"output_index": block.index, "item_id": self._item_id(block)}
        inner = place if block.kind == "call" else {**place, "content_index": 0}
        empty = Block(block.kind, block.index, "", block.name, block.call_id)
        piece = {"call": "function_call_arguments", "text": "output_text", "reasoning": "reasoning_text"}[block.kind]
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        match what:
            case "open":
                item = self._item(empty, "in_progress") | ({} if block.kind == "call" else {"content": []})
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if block.kind != "call":
                    yield self._event("response.content_part.added", **inner, part=_part(empty))
            case "more":
                yield self._event(f"response.{piece}.delta", **inner, delta=text, **more)
            case _:
                key = {"arguments": block.text, "name": block.name} if block.kind == "call" else {"text": block.text}
                yield self._event(f"response.{piece}.done", **inner, **key, **more)
                if block.kind != "call":
                    yield self._event("response.content_part.done", **inner, part=_part(block))
                item = self._item(block, "completed")
                yield self._event("response.output_item.done", output_index=block.index, item=item)

    def end(self, blocks: list[Block], choice: Choice, reason: str | None) -> Iterator[dict[str, Any]]:
        response = self.response(blocks, choice, reason)
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> dict[str, Any]:
        self._number += 1
        return error_event(error, self._number)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _item_id(self, block: Block) -> str:
        prefix = {"text": "msg", "call": "fc", "reasoning": "rs"}[block.kind]
        return f"{prefix}_{self._id}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._item_id(block), "status": status}
        match block.kind:
            case "text":
                return {**head, "type": "message", "role": "assistant", "content": [_part(block)]}
            case "reasoning":
                return {**head, "type": "reasoning", "summary": [], "content": [_part(block)]}
        return {
            **head,
            "type": "function_call",
            "call_id": block.call_id,
            "name": block.name,
            "arguments": block.text,
        }


def error_event(error: ApiError, number: int) -> dict[str, Any]:
    """Return the event of an error; `number`: of events before."""
    fields = {"code": error.code or "server_error", "message": error.message, "param": error.param}
    return {"type": "error", "sequence_number": number, **fields}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _usage(choice: Choice) -> dict[str, Any]:
    counts = usage([choice])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
        "total_tokens": counts["total_tokens"],
    }
