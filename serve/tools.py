"""Schemas of `tools` and `tool_choice`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from serve.errors import invalid
from serve.strict import Strict

MAX_TOOLS = 128
"""In one request."""

Name = Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")]


class Function(Strict):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments."""
    strict: bool | None = None
    """True if arguments of every call must follow the schema."""

    @model_validator(mode="after")
    def _takes_an_object(self) -> Self:
        if self.arguments.get("type", "object") != "object":
            raise invalid(f"tools: the parameters of {self.name} have another type than object; give that", "tools")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The JSON schema of its arguments; without one there are none."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return self.parameters

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.arguments}}


class Tool(Strict):
    """Functions are the only tools."""

    type: Literal["function"]
    function: Function


class Named(Strict):
    """The name of a function."""

    name: Name


class NamedTool(Strict):
    """The one function to call."""

    type: Literal["function"]
    function: Named


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
