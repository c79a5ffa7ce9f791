"""Grammars as llguidance's JSON `{"grammars": [...]}`, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

WHITE_SPACE = r" |\n {0,24}"
"""White space of JSON, bounded since a model may repeat it endlessly."""


def from_json_schema(schema: Mapping[str, Any]) -> str:
    """Return a schema's grammar; ValueError if `x-guidance`, llguidance's options, is not an object."""
    return json.dumps({"grammars": [{"json_schema": _with_options(schema)}]})


def json_in_lark(schema: Mapping[str, Any]) -> str:
    """Return JSON of this schema as a part of a Lark grammar."""
    return f"%json {json.dumps(_with_options(schema))}"


def from_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def from_regex(pattern: str) -> str:
    return llguidance().LLMatcher.grammar_from_regex(pattern)


def from_choices(texts: Sequence[str]) -> str:
    """Return a grammar of these texts; ValueError if there are none."""
    if not texts:
        raise ValueError("the list of choices is empty; give at least one text")
    return from_lark("start: " + " | ".join(map(json.dumps, texts)))


def _with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    given = schema.get("x-guidance", {})
    if not isinstance(given, Mapping):
        raise ValueError(f"x-guidance of the schema is {str(given)[:40]!r}; give an object, or leave it out")
    return {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE, **given}}


def llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError("grammars need llguidance, which is not installed; run: pip install llguidance") from error
    return llguidance
