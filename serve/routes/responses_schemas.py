"""Schema of `POST /v1/responses`, and its form as a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from serve.errors import MAX_SHOWN, invalid
from serve.schemas import ChatBody, Name, chat_body
from serve.strict import Loose, Strict

TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
"""Types of content that is text."""


class Content(Loose):
    """Part of an item's content."""

    type: str
    text: str | None = None


Contents = str | Annotated[list[Content], Field(fail_fast=True)]


class Item(Loose):
    """Item of the input; its type says which keys it has."""

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


class Reasoning(Loose):
    """Settings of reasoning."""

    effort: str | None = None


class Tool(Loose):
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
    reasoning: Reasoning | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    # Accepted, and without effect on the answer.
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

    # Accepted where they ask for nothing.
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
                    said = {"role": item.role, "content": _text(item.content)}
                    if item.role == "assistant" and last is not None and last["content"] is None:
                        last["content"] = said["content"]
                    else:
                        messages.append(said)
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


def _function(tool: Tool) -> dict[str, Any]:
    if tool.type != "function" or tool.name is None:
        message = f"tools has one of type {tool.type[:MAX_SHOWN]}, which runs nowhere here"
        raise invalid(f"{message}; give functions with a name and parameters", "tools")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: getattr(tool, name) for name in names}}


def _text(content: Contents | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    other = next((part.type for part in content if part.type not in TEXTS or part.text is None), None)
    if other is not None:
        message = f"input has a part of type {other[:MAX_SHOWN]}, and this model takes text alone; give parts of text"
        raise invalid(message, "input")
    return "\n".join(part.text or "" for part in content)
