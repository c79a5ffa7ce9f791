"""Schemas as zod and MCP servers write them: kept as far as a grammar can, and the rest is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serve.parsing.json_schemas import adapted, warnings_of
from sharesd.data.grammar_spec import from_json_schema
from sharesd.sampling.constraints import Grammars
from tests.helpers.fake_engine import make_tokenizer
from tests.helpers.serve_requests import CHAT, HELLO, TEXT, error_of
from tests.helpers.served_model import Served, served
from tests.helpers.tiny_tokenizer import TOOL_TEMPLATE
from tests.serve.test_serve_streams import stream

TOKENIZER = make_tokenizer()
GRAMMARS = Grammars(TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_ids=TOKENIZER.eos_ids)
WORD = {"type": "string", "maxLength": 4}
EITHER = {"type": "object", "properties": {"a": WORD, "b": WORD}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}


def takes(schema: dict[str, Any], value: Any) -> bool:
    ids = [*TOKENIZER.encode(json.dumps(value)), TOKENIZER.eos_ids[0]]
    return GRAMMARS.matcher(from_json_schema(adapted(schema))).advance(ids) == len(ids)


def warnings(schema: dict[str, Any]) -> list[str]:
    return warnings_of(GRAMMARS.matcher(from_json_schema(adapted(schema))).warnings, {"here": schema})


RECORD = {"type": "object", "additionalProperties": {"type": "integer"}}
KEPT: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "string", "nullable": True}, ["a", None], [5]),
    ({**RECORD, "propertyNames": {"type": "string"}}, [{"a": 1}, {}], [{"a": "b"}]),
    ({**RECORD, "propertyNames": {"type": "string", "pattern": "^[a-z]+$"}}, [{"ab": 1}], [{"A": 1}, {"a": "x"}]),
    ({**RECORD, "propertyNames": {"enum": ["x", "y"]}}, [{"x": 1, "y": 2}], [{"z": 1}]),
    ({**RECORD, "propertyNames": {"const": "x"}}, [{"x": 1}], [{"z": 1}]),
    ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "x"}, ["a", None], [5]),
    (
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/w", "maxLength": 2}}, "$defs": {"w": WORD}},
        [{"a": "xy"}],
        [{"a": "xyz"}],
    ),
    ({"type": "object", "properties": {"propertyNames": WORD, "nullable": WORD}}, [{"nullable": "a"}], [5]),
    (
        {"type": "array", "items": {"type": "string", "nullable": True}, "$schema": "http://json-schema.org/x"},
        [["a", None]],
        [[1]],
    ),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), KEPT, ids=lambda value: str(value)[:40])
def test_what_a_grammar_can_say_is_kept(schema: dict[str, Any], right: list[Any], wrong: list[Any]) -> None:
    assert all(takes(schema, value) for value in right)
    assert not any(takes(schema, value) for value in wrong)
    assert warnings(schema) == []


FREE: list[tuple[dict[str, Any], Any, str]] = [
    ({"type": "string", "format": "hex-color"}, "x", '"hex-color"'),
    ({**RECORD, "propertyNames": {"minLength": 2}}, {"a": 1}, '"propertyNames"'),
    ({"type": "string", "not": {"const": "a"}}, "a", '"not"'),
    ({"type": "array", "items": WORD, "uniqueItems": True}, ["a", "a"], '"uniqueItems"'),
    (EITHER, {"a": "x", "b": "y"}, "oneOf as anyOf"),
]


@pytest.mark.parametrize(("schema", "value", "named"), FREE, ids=lambda value: str(value)[:40])
def test_what_it_cannot_is_free_and_named(schema: dict[str, Any], value: Any, named: str) -> None:
    assert takes(schema, value)
    [warning] = warnings(schema)
    assert warning.startswith("here: the grammar ") and warning.endswith(named)
    assert not takes(schema, 5), "the rest is kept"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(template=TOOL_TEMPLATE, max_context=2048) as running:
        yield running


def function(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    function("climb", {"type": "object", "properties": {"at": {"type": "string", "format": "hex-color"}}}),
    function("sing", {"type": "object", "properties": {"at": WORD}}),
]


def test_the_answer_says_what_is_free(server: Served) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 4}
    expected = ['tools: the parameters of climb: the grammar does not enforce "hex-color"']
    assert server.post(CHAT, **body).json()["warnings"] == expected
    first, *rest = stream(server, CHAT, **body)
    assert first["warnings"] == expected and not any("warnings" in chunk for chunk in rest)
    assert "warnings" not in server.post(CHAT, messages=HELLO, tools=TOOLS, max_tokens=4).json(), "nothing is kept"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": EITHER}}
    for more in ({"response_format": form}, {"structured_outputs": {"json": EITHER}}):
        done = server.post(TEXT, prompt="the", max_tokens=4, **more).json()
        assert done["warnings"] == [f"{next(iter(more))}: the grammar treats oneOf as anyOf"]
    assert "warnings" not in server.complete(structured_outputs={"json": WORD}, max_tokens=4)


def test_functions_may_be_chosen_in_all_of_openais_forms(server: Served) -> None:
    def grammar(choice: Any) -> str:
        server.engine.added.clear()
        response = server.post(CHAT, messages=HELLO, tools=TOOLS, tool_choice=choice, max_tokens=2)
        assert response.status_code == 200, response.text
        return server.engine.added[0].params.grammar or ""

    def allowed(mode: str, *names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    one = grammar({"type": "function", "function": {"name": "sing"}})
    assert "sing" in one and "climb" not in one
    assert grammar({"type": "function", "name": "sing"}) == one
    both = grammar("required")
    assert "sing" in both and "climb" in both
    assert grammar({"type": "required"}) == both == grammar(allowed("required", "sing", "climb"))
    assert "climb" not in grammar(allowed("required", "sing")) and grammar({"type": "auto"}) == ""
    server.engine.scripts["the cat"] = '<tool_call>\n{"name": "climb", "arguments": {}}\n</tool_call>'
    done = server.post(CHAT, messages=HELLO, tools=TOOLS, tool_choice=allowed("auto", "sing")).json()
    assert "tool_calls" not in done["choices"][0]["message"], "climb is not allowed"
    for wrong in (allowed("auto", "fly"), allowed("auto"), allowed("any", "sing"), {"type": "function"}):
        error = error_of(server.post(CHAT, messages=HELLO, tools=TOOLS, tool_choice=wrong))
        assert error["param"].startswith("tool_choice")
