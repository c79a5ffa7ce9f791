"""Schemas of chat messages and tools, and conversion for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from serve.errors import invalid
from serve.fields import Loose, Strict
from sharesd.data import chat_messages
from sharesd.data.chat_messages import function_for_template

MAX_TOOLS = 128
"""Maximum tools in a request."""

Name = Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")]


class Function(Strict):
    """Function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    cache_control: Any = None
    """Accepted without effect."""
    strict: bool | None = None
    """True: arguments of every call must match the schema."""

    @model_validator(mode="after")
    def _takes_an_object(self) -> Self:
        if self.arguments.get("type", "object") != "object":
            raise invalid(f"tools: the parameters of {self.name} must be of type object", "tools")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """JSON schema of the arguments; without a schema, no arguments."""
        return self.for_template()["function"]["parameters"]

    def for_template(self) -> dict[str, Any]:
        """Return the function in the form of chat templates."""
        return function_for_template(self.name, self.description, self.parameters)


class Tool(Strict):
    """Tool; always a function."""

    type: Literal["function"]
    function: Function
    cache_control: Any = None
    """Accepted without effect."""


class Named(Strict):
    """Name of a function."""

    name: Name


class NamedTool(Strict):
    """Choice of one function that must be called."""

    type: Literal["function"]
    function: Named | None = None
    name: Name | None = None
    """Name in the form of the API of responses."""

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if (self.function is None) == (self.name is None):
            raise invalid('tool_choice has no name; give {"type": "function", "function": {"name"}}', "tool_choice")
        return self

    @property
    def called(self) -> str:
        """Name of the function."""
        return self.function.name if self.function else self.name or ""


class Allowed(Strict):
    """Functions that may be called, of those in the prompt."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(Strict):
    """OpenAI's choice of several functions."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class Mode(Strict):
    """Choice of a mode, as an object."""

    type: Literal["none", "auto", "required"]


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools | Mode


@dataclass(frozen=True)
class ToolPolicy:
    """Meaning of a `tool_choice`."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None
    """Functions that may be called; None: all."""
    is_one: bool = False
    """True for one call of one function."""


def tool_policy(given: ToolChoice | None) -> ToolPolicy:
    """Return the meaning of a `tool_choice`."""
    match given:
        case NamedTool():
            return ToolPolicy("required", (given.called,), is_one=True)
        case AllowedTools():
            return ToolPolicy(given.allowed_tools.mode, tuple(tool.called for tool in given.allowed_tools.tools))
        case Mode():
            return ToolPolicy(given.type)
        case _:
            return ToolPolicy(given or "auto")


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
    """Message; unknown keys, as other servers' answers have them, are ignored."""

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
    def _fits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise invalid(f"tool_calls are only allowed in messages of role assistant, not {self.role}", "messages")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise invalid("messages of role tool, and only those, have a tool_call_id", "messages")
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
