"""Grammars, which say what an answer must be, written from schemas and patterns. Quick to import: without torch.

A grammar is what llguidance reads: JSON `{"grammars": [...]}`, as these functions make it, or Lark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

WHITE_SPACE = r" |\n {0,24}"
"""Between the parts of JSON, where a model could go on for ever."""


def from_json_schema(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON of this schema. Its `x-guidance`, llguidance's options, may say otherwise about white space.

    ValueError where that is no object.
    """
    return json.dumps({"grammars": [{"json_schema": _with_options(schema)}]})


def json_in_lark(schema: Mapping[str, Any]) -> str:
    """JSON of this schema as a part of a grammar in Lark; ValueError as `from_json_schema`."""
    return f"%json {json.dumps(_with_options(schema))}"


def from_lark(text: str) -> str:
    """A grammar in llguidance's dialect of Lark."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def from_regex(pattern: str) -> str:
    """The texts that a regular expression (as Rust knows them) matches as a whole."""
    return llguidance().LLMatcher.grammar_from_regex(pattern)


def from_choices(texts: Sequence[str]) -> str:
    """One of these texts; ValueError where there is none."""
    if not texts:
        raise ValueError("the list of choices is empty; give at least one text")
    return from_lark("start: " + " | ".join(map(json.dumps, texts)))


def _with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    given = schema.get("x-guidance", {})
    if not isinstance(given, Mapping):
        raise ValueError(f"x-guidance of the schema is {str(given)[:40]!r}; give an object, or leave it out")
    return {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE, **given}}


def llguidance() -> Any:
    """The package; ValueError where it is missing."""
    try:
        import llguidance
    except ImportError as error:
        raise ValueError("grammars need llguidance, which is not installed; run: pip install llguidance") from error
    return llguidance
