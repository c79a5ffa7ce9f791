"""Route `POST /v1/responses`, OpenAI's newer API, without stored state: body, and answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import Field

from serve.choice_state import Choice, usage
from serve.errors import MAX_SHOWN, ApiError, invalid
from serve.fields import Loose, Strict
from serve.middleware import RequestState
from serve.routes.answer_blocks import AnswerBlock, respond
from serve.routes.chat import ChatFormat, chat_call
from serve.routes.generation import served_name
from serve.schemas import ChatBody, Name, chat_body, read

TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
"""Types of content that is text."""


class ResponsesContent(Loose):
    """Part of an item's content."""

    type: str
    text: str | None = None


Contents = str | Annotated[list[ResponsesContent], Field(fail_fast=True)]


class Item(Loose):
    """Item of the input; its keys depend on its type."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Contents | None = None
    summary: Contents | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: Contents | None = None


class Form(Loose):
    """Form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class Text(Loose):
    """Settings of the answer's text."""

    format: Form | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Loose):
    """Settings of reasoning."""

    effort: str | None = None


class ResponsesTool(Loose):
    """Function that the model may call."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesBody(Strict):
    """Body of `POST /v1/responses`; nothing is stored."""

    model: Name = None
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: Text | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    # Accepted without effect on the answer.
    store: Any = None
    include: Any = None
    metadata: Any = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    client_metadata: Any = None
    stream_options: Any = None
    truncation: Literal["disabled"] | None = None

    # Accepted only if they have no effect.
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    background: Literal[False] | None = None
    max_tool_calls: None = None
    top_logprobs: Literal[0] | None = None

    def as_chat(self) -> ChatBody:
        """Return the request as a chat; ApiError 400 if that is impossible."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages + self._messages(),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": [_function(tool) for tool in self.tools or ()],
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and "allowed_tools" not in choice:
            allowed = {key: value for key, value in choice.items() if key != "type"}
            body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        form = self.text.format if self.text else None
        if form is not None:
            named = {"name": form.name, "schema": form.schema_}
            body["response_format"] = {"type": form.type} | ({"json_schema": named} if form.schema_ is not None else {})
        return chat_body(body)

    def _messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = []
        for item in self.input:
            last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
            match item.type:
                case "message":
                    new = {"role": item.role, "content": _text(item.content)}
                    if item.role == "assistant" and last is not None and last["content"] is None:
                        last["content"] = new["content"]
                    else:
                        messages.append(new)
                case "reasoning":
                    thought = _text(item.content) or _text(item.summary)
                    if thought:
                        messages.append({"role": "assistant", "content": None, "reasoning_content": thought})
                case "function_call":
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    if last is None:
                        last = {"role": "assistant", "content": None}
                        messages.append(last)
                    last.setdefault("tool_calls", []).append(call)
                case "function_call_output":
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
                case other:
                    known = "message, reasoning, function_call and function_call_output"
                    message = f"input has an item of type {other[:MAX_SHOWN]}; give items of type {known}"
                    raise invalid(message, "input")
        return messages


def _function(tool: ResponsesTool) -> dict[str, Any]:
    if tool.type != "function" or tool.name is None:
        message = f"tools has one of type {tool.type[:MAX_SHOWN]}, which this server cannot run"
        raise invalid(f"{message}; give functions with a name and parameters", "tools")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: getattr(tool, name) for name in names}}


def _text(content: Contents | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    other = next((part.type for part in content if part.type not in TEXTS or part.text is None), None)
    if other is not None:
        message = f"input has a part of type {other[:MAX_SHOWN]}, but this model accepts only text; give parts of text"
        raise invalid(message, "input")
    return "\n".join(part.text or "" for part in content)


async def responses(request: Request) -> Response:
    """Handle `POST /v1/responses`."""
    given = await read(request, ResponsesBody)
    body = given.as_chat()
    call = await chat_call(request, body)
    service = request.app.state.service
    dialect = Responses(request.state.visit, served_name(service, body.model), given, call.choices[0])
    return await respond(request, call, body, ChatFormat(call.model, body), dialect)


class Responses:
    """Answer to one request, whole or as events."""

    def __init__(self, visit: RequestState, model: str, body: ResponsesBody, choice: Choice) -> None:
        self._id, self._model, self._body, self._choice = visit.id, model, body, choice
        self._created, self._number = visit.created, -1

    def whole(self, blocks: list[AnswerBlock], choice: Choice | None, reason: str | None) -> dict[str, Any]:
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

    def _status(self, blocks: list[AnswerBlock], block: AnswerBlock, cut: bool) -> str:
        return "incomplete" if cut and block is blocks[-1] else "completed"

    def begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self.whole([], None, None))

    def change(self, what: str, block: AnswerBlock, text: str) -> Iterator[dict[str, Any]]:
        place = {"output_index": block.index, "item_id": self._item_id(block)}
        inner = place if block.kind == "call" else {**place, "content_index": 0}
        empty = AnswerBlock(block.kind, block.index, "", block.name, block.call_id)
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

    def end(self, blocks: list[AnswerBlock], choice: Choice, reason: str | None) -> Iterator[dict[str, Any]]:
        response = self.whole(blocks, choice, reason)
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> dict[str, Any]:
        self._number += 1
        return error_event(error, self._number)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _item_id(self, block: AnswerBlock) -> str:
        prefix = {"text": "msg", "call": "fc", "reasoning": "rs"}[block.kind]
        return f"{prefix}_{self._id}_{block.index}"

    def _item(self, block: AnswerBlock, status: str) -> dict[str, Any]:
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
    """Return the event of an error; `number`: number of earlier events."""
    fields = {"code": error.code or "server_error", "message": error.message, "param": error.param}
    return {"type": "error", "sequence_number": number, **fields}


def _part(block: AnswerBlock) -> dict[str, Any]:
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
