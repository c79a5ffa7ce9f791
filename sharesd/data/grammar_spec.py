"""Grammars of answers, from schemas and patterns; imports no torch.

The form is that of llguidance: JSON `{"grammars": [...]}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

WHITE_SPACE = r" |\n {0,24}"
"""Pattern of white space between the parts of JSON.

It is bounded, since a model may repeat unbounded white space without end.
"""


def from_json_schema(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON of this schema.

    `x-guidance` in the schema has options of llguidance, which may replace the white space.

    Raises:
        ValueError: `x-guidance` is no object.
    """
    return json.dumps({"grammars": [{"json_schema": _with_options(schema)}]})


def json_in_lark(schema: Mapping[str, Any]) -> str:
    """Return JSON of this schema as a part of a Lark grammar.

    Raises ValueError as `from_json_schema`.
    """
    return f"%json {json.dumps(_with_options(schema))}"


def from_lark(text: str) -> str:
    """Return a grammar in llguidance's dialect of Lark."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def from_regex(pattern: str) -> str:
    """Return a grammar of the texts that a Rust regular expression matches."""
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
    """Import and return the package; ValueError if it is missing."""
    try:
        import llguidance
    except ImportError as error:
        raise ValueError("grammars need llguidance, which is not installed; run: pip install llguidance") from error
    return llguidance
