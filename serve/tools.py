"""Schemas of `tools` and `tool_choice`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from serve.errors import invalid
from serve.strict import Strict

MAX_TOOLS = 128
"""Maximum tools in a request."""

Name = Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")]


class Function(Strict):
    """Function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
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
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return self.parameters

    def for_template(self) -> dict[str, Any]:
        """Return the function in the form of chat templates."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.arguments}}


class Tool(Strict):
    """Tool; always a function."""

    type: Literal["function"]
    function: Function


class Named(Strict):
    """Name of a function."""

    name: Name


class NamedTool(Strict):
    """Choice of one function that must be called."""

    type: Literal["function"]
    function: Named


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
