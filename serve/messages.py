"""Schemas of chat messages, and conversion for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from serve.errors import invalid
from serve.strict import Loose
from serve.tools import Name
from sharesd.data import chat_messages


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
    def text(self) -> str:
        """Content as text, with a line per part."""
        parts = [part.text for part in self.content] if isinstance(self.content, list) else [self.content or ""]
        return "\n".join(parts)


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates read, as `chat_messages.for_template` does; ApiError 400."""
    try:
        return chat_messages.for_template([_plain(message) for message in messages])
    except ValueError as error:
        raise invalid(str(error), "messages") from None


def _plain(message: Message) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True, include={"role", "content", "name", "tool_call_id"})
    if message.thoughts:
        fields[chat_messages.REASONING[0]] = message.thoughts
    if message.tool_calls:
        called = [{"name": call.function.name, "arguments": call.function.arguments} for call in message.tool_calls]
        calls = zip(message.tool_calls, called, strict=True)
        fields["tool_calls"] = [{"id": call.id, "type": "function", "function": function} for call, function in calls]
    return fields
