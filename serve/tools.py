"""Schemas of `tools` and `tool_choice`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from serve.errors import invalid
from serve.strict import Strict
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
            raise invalid(f"tools: the parameters of {self.name} have another type than object; give that", "tools")
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
class Choice:
    """Meaning of a `tool_choice`."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None
    """Functions that may be called; None: all."""
    is_one: bool = False
    """True for one call of one function."""


def choice_of(given: ToolChoice | None) -> Choice:
    """Return the meaning of a `tool_choice`."""
    match given:
        case NamedTool():
            return Choice("required", (given.called,), is_one=True)
        case AllowedTools():
            return Choice(given.allowed_tools.mode, tuple(tool.called for tool in given.allowed_tools.tools))
        case Mode():
            return Choice(given.type)
        case _:
            return Choice(given or "auto")
