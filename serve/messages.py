"""Schemas of chat messages, and conversion for chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from serve.errors import invalid
from serve.strict import Loose
from serve.tools import Name


class Part(Loose):
    """Part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Loose):
    """Called function, with arguments as JSON."""

    name: Name
    arguments: str


class ToolCall(Loose):
    """Tool call of an earlier answer."""

    id: str
    type: Literal["function"] | None = None
    function: CalledFunction
    index: int | None = None
    """Position in a streamed answer; accepted without effect."""


class Message(Loose):
    """Message; unknown keys, of other servers' answers, are left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    reasoning_content: str | None = None
    """Reasoning of an assistant before its answer."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    """Tool calls of an assistant message."""
    tool_call_id: str | None = None
    """Id of the call whose result a tool message has."""

    @model_validator(mode="after")
    def _has_what_its_role_asks_for(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise invalid(f"tool_calls are in a message of role {self.role}; only assistants have some", "messages")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise invalid("messages of role tool have a tool_call_id, and no others", "messages")
        if self.content is None and not self.tool_calls and not self.thoughts:
            raise invalid(f"a message of role {self.role} has no content; give a text", "messages")
        return self

    @property
    def thoughts(self) -> str:
        """Reasoning of an assistant, or an empty text."""
        return (self.reasoning_content or self.reasoning or "") if self.role == "assistant" else ""

    @property
    def text(self) -> str | None:
        """Content as text, with a line per part, or None."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates.

    `developer` becomes `system`, arguments become objects, and tool messages get the function's name. Content of calls
    may be None. Raises ApiError 400 if arguments are not an object.
    """
    shown: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        one: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
        one["content"] = message.text if message.tool_calls else message.text or ""
        if message.thoughts:
            one["reasoning_content"] = message.thoughts
        if message.tool_calls:
            one["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
            names |= {call.id: call.function.name for call in message.tool_calls}
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        name = message.name or names.get(message.tool_call_id or "")
        shown.append(one | ({"name": name} if name else {}))
    return shown


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    text = call.function.arguments
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        message = f"the arguments of a call of {call.function.name} are no JSON object: {text[:40]!r}"
        raise invalid(f"{message}; leave the call out, or repair it", "messages")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
