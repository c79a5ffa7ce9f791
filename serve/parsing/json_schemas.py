"""Conversion of clients' JSON schemas to what the grammar engine supports."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values map names to schemas."""
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")
DRAFTS = "https://json-schema.org/draft"
DRAFT = re.compile("https?://json-schema.org/draft")
"""Dialects that llguidance supports; others are read as the newest."""
LENIENT = {"lenient": True, "coerce_one_of": True}
"""Options of llguidance: ignore keywords that it cannot enforce, with a warning."""


def adapted(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an equivalent schema that the grammar engine supports.

    `nullable` becomes another type, and `propertyNames` become patterns or properties. Keywords that a grammar cannot
    enforce are ignored; `warnings_of` lists them.
    """
    options = schema.get("x-guidance", {})
    own = {**LENIENT, **options} if isinstance(options, Mapping) else options
    return {**_adapted(schema), "x-guidance": own}


def warnings_of(found: Sequence[str], where: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return llguidance's warnings in terms of the request.

    `where` has its schemas, by the name of their place.
    """
    warnings: list[str] = []
    for line in found:
        keys = re.fullmatch(r"Unimplemented keys: (\[.*\])", line)
        unknown = re.fullmatch(r"Unknown format: (.*)", line)
        parts = json.loads(keys[1]) if keys else [unknown[1]] if unknown else []
        warnings += [f"{_place(part, where)}: the grammar does not enforce {json.dumps(part)}" for part in parts]
        if not parts:
            warnings.append(f"{_place('oneOf', where)}: the grammar treats oneOf as anyOf" if "oneOf" in line else line)
    return list(dict.fromkeys(warnings))


def _place(word: str, where: Mapping[str, Mapping[str, Any]]) -> str:
    found = [place for place, schema in where.items() if json.dumps(word) in json.dumps(schema)]
    return ", ".join(found or where)


def _adapted(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = {name: _inner(name, value) for name, value in schema.items() if name != "nullable"}
    if not DRAFT.match(str(made.get("$schema", DRAFTS))):
        del made["$schema"]
    made = _with_named_properties(made)
    if schema.get("nullable") is not True:
        return made
    return {"anyOf": [made, {"type": "null"}]}


def _inner(name: str, value: Any) -> Any:
    if name in MAPS and isinstance(value, Mapping):
        return {key: _adapted(one) for key, one in value.items()}
    if name in LISTS and isinstance(value, list):
        return [_adapted(one) for one in value]
    return _adapted(value) if name in SINGLE else value


def _with_named_properties(schema: dict[str, Any]) -> dict[str, Any]:
    names, rest = schema.get("propertyNames"), {k: v for k, v in schema.items() if k != "propertyNames"}
    if not isinstance(names, Mapping):
        return schema
    rules = {key: value for key, value in names.items() if key not in ("title", "description", "$comment")}
    if rules in ({}, {"type": "string"}):
        return rest
    if schema.get("properties") or schema.get("patternProperties"):
        return schema
    rules.pop("type", None)
    value = schema.get("additionalProperties", True)
    match list(rules.items()):
        case [("pattern", str(pattern))]:
            return {**rest, "patternProperties": {pattern: value}, "additionalProperties": False}
        case [("enum", list(allowed))] if all(isinstance(name, str) for name in allowed):
            return {**rest, "properties": dict.fromkeys(allowed, value), "additionalProperties": False}
        case [("const", str(name))]:
            return {**rest, "properties": {name: value}, "additionalProperties": False}
    return schema
