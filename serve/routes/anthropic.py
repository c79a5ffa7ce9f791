"""Routes `POST /v1/messages` and `POST /v1/messages/count_tokens`, in Anthropic's format: bodies, and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import Field

from serve.choice_state import Choice, usage
from serve.errors import MAX_SHOWN, ApiError, invalid
from serve.fields import Loose, Strict
from serve.messages import for_template
from serve.routes.answer_blocks import AnswerBlock, respond
from serve.routes.chat import ChatFormat, chat_call, encode_body
from serve.routes.generation import served_name
from serve.schemas import MAX_STOPS, ChatBody, chat_body, read
from sharesd.models.tokenizer import Tokenizer


class AnthropicContent(Loose):
    """Block of a message; its keys depend on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[AnthropicContent] | None = None


Contents = str | Annotated[list[AnthropicContent], Field(fail_fast=True)]


class AnthropicMessage(Loose):
    """Message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Contents


class AnthropicTool(Loose):
    """Function that the model may call."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class Chosen(Loose):
    """Choice of a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Loose):
    """Switch of reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]


class CountBody(Strict):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: Contents | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = None
    tool_choice: Chosen | None = None
    thinking: Thinking | None = None

    # Accepted without effect on the answer.
    metadata: Any = None
    service_tier: Any = None
    context_management: Any = None
    output_config: Any = None
    cache_control: Any = None
    betas: Any = None
    speed: Any = None
    inference_geo: Any = None

    # Accepted only if empty.
    container: None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None

    def as_chat(self) -> ChatBody:
        """Return the request as a chat; ApiError 400 if that is impossible."""
        tools = [_function(tool) for tool in self.tools or ()]
        messages = [message for turn in self.messages for message in _messages(turn.role, turn.content)]
        if self.system:
            messages.insert(0, {"role": "system", "content": _text(self.system, "system")})
        body: dict[str, Any] = {"model": self.model, "messages": messages, "tools": tools, **self._more()}
        if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
            body["continue_final_message"] = True
        if self.thinking is not None:
            body["enable_thinking"] = self.thinking.type != "disabled"
        choice = self.tool_choice
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            body["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
            body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return chat_body(body)

    def _more(self) -> dict[str, Any]:
        """Return further fields of the chat."""
        return {}


class MessagesBody(CountBody):
    """Body of `POST /v1/messages`."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None

    def _more(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}


def _function(tool: AnthropicTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        message = f"tools has {tool.name[:MAX_SHOWN]} of type {tool.type[:MAX_SHOWN]}, which this server cannot run"
        raise invalid(f"{message}; give functions with an input_schema", "tools")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _messages(role: str, content: Contents) -> Iterator[dict[str, Any]]:
    """Yield a turn as messages of a chat, results of tools first."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks = [block for block in content if block.type != "redacted_thinking"]
    for block in blocks:
        if block.type == "tool_result":
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "", "messages")}
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    thought = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    shown = [block for block in blocks if block.type not in ("tool_result", "tool_use", "thinking")]
    if shown or calls or thought:
        message: dict[str, Any] = {"role": role, "content": _text(shown, "messages") if shown else None}
        if calls:
            message["tool_calls"] = calls
        yield message | ({"reasoning_content": thought} if thought else {})


def _call(block: AnthropicContent) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _text(content: Contents | Sequence[AnthropicContent], param: str) -> str:
    if isinstance(content, str):
        return content
    other = next((block.type for block in content if block.type != "text" or block.text is None), None)
    if other is not None:
        message = (
            f"{param} has a block of type {other[:MAX_SHOWN]}, but this model accepts only text; give blocks of text"
        )
        raise invalid(message, param)
    return "\n".join(block.text or "" for block in content)


STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


async def messages(request: Request) -> Response:
    """Handle `POST /v1/messages`."""
    given = await read(request, MessagesBody)
    body = given.as_chat()
    call = await chat_call(request, body)
    service = request.app.state.service
    name = served_name(service, body.model)
    dialect = Messages(request.state.visit.id, name, call.model.tokenizer, body, call.choices[0])
    return await respond(request, call, body, ChatFormat(call.model, body), dialect)


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

    def whole(self, blocks: list[AnswerBlock], choice: Choice, reason: str | None) -> dict[str, Any]:
        """Return the whole answer."""
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        content = [_content(block) for block in blocks]
        return {**head, "content": content, **self._ending(choice, reason), "usage": _usage(choice)}

    def begin(self) -> Iterator[dict[str, Any]]:
        message = self.whole([], self._choice, None)
        yield {"type": "message_start", "message": message | {"stop_reason": None}}

    def change(self, what: str, block: AnswerBlock, text: str) -> Iterator[dict[str, Any]]:
        match what, block.kind:
            case "open", _:
                empty = AnswerBlock(block.kind, block.index, "", block.name, block.call_id)
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

    def end(self, blocks: list[AnswerBlock], choice: Choice, reason: str | None) -> Iterator[dict[str, Any]]:
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


def _content(block: AnswerBlock) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
    given = _object(block.text)
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}


def _object(text: str) -> dict[str, Any]:
    """Return arguments as an object; an empty one if they are incomplete."""
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
