"""Schemas of the answer's form: `response_format`, `structured_outputs`, `stream_options`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from serve.errors import invalid
from serve.strict import Strict


class StreamOptions(Strict):
    """Options of a stream's last chunk."""

    include_usage: bool | None = None
    """True: the last chunk has the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """True: all chunks have the usage so far."""
    include_obfuscation: Literal[False] | None = None
    """False or null: obfuscation is not supported."""


class JsonSchema(Strict):
    """JSON schema of the answer; always strict."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class Format(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise invalid("response_format: give json_schema with the type json_schema, only", "response_format")
        return self


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`, with exactly one key."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """Grammar in llguidance's dialect of Lark."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(part is not None for part in (self.json_, self.regex, self.choice, self.grammar)) != 1:
            raise invalid("structured_outputs: give one of json, regex, choice and grammar", "structured_outputs")
        return self
