"""Tools in chats, over real HTTP: a fake engine says what it is told, and a tiny model must call.

Schemas as zod and MCP servers write them are kept as far as a grammar can, and the rest is named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve.parsing.json_schemas import adapted, warnings_of
from sharesd.config import EngineConfig, Mode
from sharesd.data.grammar_spec import from_json_schema
from sharesd.sampling.constraints import Grammars
from tests.helpers.fake_engine import make_tokenizer
from tests.helpers.serve_requests import CHAT, HELLO, TEXT, error_of
from tests.helpers.served_model import Served, served
from tests.helpers.tiny_tokenizer import CHAT_TEMPLATE, TOOL_TEMPLATE
from tests.serve.common import make_model, prompt_of, real, stream

SERVED = {"template": TOOL_TEMPLATE, "max_context": 2048}


def function(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


WEATHER = function(
    "get_weather",
    description="The weather in a city.",
    parameters={
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["the red mat", "the blue sky"]}},
    },
)
TIME = function("get_time")
TOOLS = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "the red mat", "days": 2}}\n</tool_call>'
ARGUMENTS = {"city": "the red mat", "days": 2}
SCRIPTS = {
    "the weather": f"I look.\n{CALL}",
    "both": f"{CALL}\n<tool_call>\n" + '{"name": "get_time", "arguments": {}}\n</tool_call>',
    "nonsense": "<tool_call>nothing</tool_call>",
}


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "tools": TOOLS, "seed": 1} | more


def test_the_openai_client_gets_calls_and_sends_them_back(server: Served) -> None:
    client = server.openai()
    messages: list[Any] = [{"role": "user", "content": "the weather"}]
    done = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS, max_tokens=300)  # type: ignore
    choice = done.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function" and len(call.id) == 9 and call.id.isalnum()
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    client.chat.completions.create(model="fake", messages=messages, tools=TOOLS, max_tokens=5)  # type: ignore
    shown = prompt_of(server)
    assert json.dumps(WEATHER) in shown and '"name": "get_time", "parameters": {"type": "object"' in shown
    assert f"assistant\nI look.{CALL}<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>" in shown


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("question", ["the weather", "both", "nonsense", "the cat"])
def test_a_stream_of_calls_is_the_whole_answer(server: Served, question: str, speculate: bool) -> None:
    body = asked(question, max_tokens=300, speculate=speculate)
    whole = server.post(CHAT, **body).json()["choices"][0]
    message: dict[str, Any] = {"role": None, "content": "", "tool_calls": []}
    reasons, num_pieces = [], 0
    for chunk in stream(server, CHAT, **body):
        delta = chunk["choices"][0]["delta"]
        reasons.append(chunk["choices"][0]["finish_reason"])
        assert "role" not in delta or message["role"] is None
        message["role"] = delta.get("role", message["role"])
        message["content"] += delta.get("content", "")
        num_pieces += "tool_calls" in delta
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({**part, "function": dict(part["function"])})
                continue
            assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
            message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    assert reasons == [None] * (len(reasons) - 1) + [whole["finish_reason"]]
    expected = whole["message"]
    assert (message["role"], message["content"]) == ("assistant", expected["content"] or "")
    said = [call["function"] for call in message["tool_calls"]]
    assert said == [call["function"] for call in expected.get("tool_calls", [])]
    assert len(said) == {"the weather": 1, "both": 2}.get(question, 0)
    assert (whole["finish_reason"] == "tool_calls") == bool(said)
    contents = {"the weather": "I look.", "both": None, "nonsense": SCRIPTS["nonsense"]}
    assert expected["content"] == contents[question] if question in contents else expected["content"]
    assert num_pieces > 5 or speculate or not said, "arguments come as they are written"


def test_calls_are_as_many_as_are_wanted_and_fit(server: Served) -> None:
    def done(**more: Any) -> tuple[dict[str, Any], str]:
        choice = server.post(CHAT, **asked("both", **more)).json()["choices"][0]
        return choice["message"], choice["finish_reason"]

    message, _ = done(parallel_tool_calls=False)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    message, reason = done(max_tokens=70)
    assert reason == "length" and message["tool_calls"], "a call is cut"
    message, _ = done(tool_choice="none")
    assert message["content"].startswith("<tool_call>") and "tool_calls" not in message
    assert "get_weather" not in prompt_of(server), "the model is not shown tools that it may not call"


def test_tokens_of_a_conversation_are_those_of_its_chat(server: Served) -> None:
    server.engine.added.clear()
    body = asked("the weather", chat_template_kwargs={"thinking": True})
    del body["seed"]
    server.post(CHAT, **body, max_tokens=1)
    assert server.post("/tokenize", **body).json()["tokens"] == server.engine.added[0].prompt_ids
    assert error_of(server.post("/tokenize", prompt="the", tools=TOOLS))["param"] == "tools"


def test_variables_reach_the_template(server: Served) -> None:
    server.engine.added.clear()
    for more in ({}, {"chat_template_kwargs": {"thinking": True}}, {"add_generation_prompt": False}):
        server.post(CHAT, messages=HELLO, max_tokens=1, **more)
    ends = [server.engine.tokenizer.decode(r.prompt_ids, skip_special_tokens=False) for r in server.engine.added]
    turn = "<|im_end|>\n<|im_start|>assistant\n"
    assert [end.rpartition("the cat")[2] for end in ends] == [turn, f"{turn}Hm", "<|im_end|>\n"]
    for name in ("think", "messages", "tools"):
        error = error_of(server.post(CHAT, messages=HELLO, chat_template_kwargs={name: 1}))
        assert error["param"] == "chat_template_kwargs" and name in error["message"] and "thinking" in error["message"]


NAMED = function("get_weather")
CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NO_GRAMMARS: tuple[dict[str, Any], ...] = ({"properties": 5}, {"x-guidance": 5}, {"enum": ["x" * 100_000]})
NO_OBJECT = {**CALLED, "function": {"name": "f", "arguments": "5"}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        *[({"tools": tools}, "tools") for tools in (5, {}, [5], [{"type": "retrieval"}], [{"type": "function"}])],
        *[({"tools": [function(name)]}, "tools") for name in ("", "a b", "x" * 65, "é")],
        *[({"tools": [function(parameters=wrong)]}, "tools") for wrong in ([], "x", {"type": "array"})],
        ({"tools": [function(), function()]}, "tools"),
        ({"tools": [function(str(i)) for i in range(129)]}, "tools"),
        *[({"tool_choice": choice}, "tool_choice") for choice in ("required", "always", NAMED, 5)],
        ({"tools": [TIME], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "tools"),
        *[({"tools": [function(parameters=wrong)], "tool_choice": "required"}, "tools") for wrong in NO_GRAMMARS],
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, None),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALLED]}]}, "messages"),
        *[({"messages": [{"role": "assistant", "tool_calls": calls}]}, "messages") for calls in ([], [NO_OBJECT])],
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_tools_are_named(server: Served, more: dict[str, Any], param: str | None) -> None:
    error = error_of(server.post(CHAT, **{"messages": HELLO, **more}))
    assert (error["param"] or "").partition(".")[0] == (param or "")


SILENT = CHAT_TEMPLATE + "{% if tools %}{% endif %}"
"""With a place for tools, but no format of calls."""


@pytest.mark.parametrize(
    ("template", "said"), [(CHAT_TEMPLATE, "no place for them"), (SILENT, "--tool-format hermes|llama|")]
)
def test_a_template_without_tools_is_told(template: str, said: str) -> None:
    with served(template=template) as server:
        error = error_of(server.post(CHAT, messages=HELLO, tools=TOOLS))
        assert error["param"] == "tools" and said in error["message"]
        assert server.post(CHAT, messages=HELLO, tools=TOOLS, tool_choice="none", max_tokens=1).status_code == 200
        said_before = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALLED]}]
        assert error_of(server.post(CHAT, messages=said_before))["param"] == "messages"


def test_the_format_may_be_given() -> None:
    with served(settings={"tool_format": "llama"}, template=SILENT) as server:
        server.engine.scripts["the cat"] = '{"name": "get_time", "parameters": {}}'
        done = server.post(CHAT, messages=HELLO, tools=TOOLS).json()["choices"][0]
        assert done["message"]["tool_calls"][0]["function"] == {"name": "get_time", "arguments": "{}"}
        refused = server.post(CHAT, messages=HELLO, tools=[function(strict=True)])
        assert "strict" in error_of(refused)["message"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"), TOOL_TEMPLATE, context=1024)


CHOICES: list[dict[str, Any]] = [
    {"tool_choice": "required", "temperature": 0},
    {"tool_choice": "required", "temperature": 1.0, "n": 2},
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": NAMED, "temperature": 1.3},
]
ANSWERS: dict[Mode, list[Any]] = {}


@pytest.mark.parametrize("mode", ["naive", "share", pytest.param("suffix", marks=pytest.mark.long), "hybrid"])
def test_a_model_that_must_call_does(folder: Path, mode: Mode) -> None:
    with real(EngineConfig(target=str(folder), mode=mode, max_batch=2)) as server:
        found = []
        for more in CHOICES:
            done = server.post(CHAT, **asked("why is the sky blue", max_tokens=300, **more)).json()
            for choice in done["choices"]:
                assert choice["message"]["content"] is None
                calls = [call["function"] for call in choice["message"]["tool_calls"]]
                assert choice["finish_reason"] == "tool_calls" or len(calls) > 2, "whole, unless there are many"
                assert all(map(is_valid, calls[: None if choice["finish_reason"] == "tool_calls" else -1]))
                found.append(calls)
        assert len(found[3]) == len(found[4]) == 1 and found[4][0]["name"] == "get_weather"
        streamed: dict[int, str] = {}
        for chunk in stream(server, CHAT, **asked("why is the sky blue", max_tokens=300, **CHOICES[1])):
            choice = chunk["choices"][0]
            for part in choice["delta"].get("tool_calls", ()):
                said = part["function"].get("name", "") + part["function"]["arguments"]
                streamed[choice["index"]] = streamed.get(choice["index"], "") + said
        assert streamed == {i: "".join(c["name"] + c["arguments"] for c in found[1 + i]) for i in range(2)}
        strict = [function(**WEATHER["function"], strict=True)]
        free = server.post(CHAT, **asked("why is the sky blue", max_tokens=40, tools=strict)).json()["choices"][0]
        assert free["message"]["content"], "a model that may call need not"
        ANSWERS[mode] = [*found, free["message"]["content"]]
    assert ANSWERS[mode] == next(iter(ANSWERS.values())), "the same in all modes"


def is_valid(call: dict[str, str]) -> bool:
    arguments = json.loads(call["arguments"])
    if call["name"] == "get_time":
        return arguments == {}
    right = [{"city": city, "days": days} for city in ("the red mat", "the blue sky") for days in range(1, 10)]
    return call["name"] == "get_weather" and arguments in right


TOKENIZER = make_tokenizer()
GRAMMARS = Grammars(TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_ids=TOKENIZER.eos_ids)
WORD, COLOUR = {"type": "string", "maxLength": 4}, {"type": "string", "format": "hex-color"}
EITHER = {"type": "object", "properties": {"a": WORD, "b": WORD}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}


def takes(schema: dict[str, Any], value: Any) -> bool:
    ids = [*TOKENIZER.encode(json.dumps(value)), TOKENIZER.eos_ids[0]]
    return GRAMMARS.matcher(from_json_schema(adapted(schema))).advance(ids) == len(ids)


def warnings(schema: dict[str, Any]) -> list[str]:
    return warnings_of(GRAMMARS.matcher(from_json_schema(adapted(schema))).warnings, {"here": schema})


RECORD = {"type": "object", "additionalProperties": {"type": "integer"}}
REFERRED = {"type": "object", "properties": {"a": {"$ref": "#/$defs/w", "maxLength": 2}}}
NULLABLE = {"type": "string", "nullable": True}
KEPT: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (NULLABLE, ["a", None], [5]),
    ({**RECORD, "propertyNames": {"type": "string"}}, [{"a": 1}, {}], [{"a": "b"}]),
    ({**RECORD, "propertyNames": {"type": "string", "pattern": "^[a-z]+$"}}, [{"ab": 1}], [{"A": 1}, {"a": "x"}]),
    ({**RECORD, "propertyNames": {"enum": ["x", "y"]}}, [{"x": 1, "y": 2}], [{"z": 1}]),
    ({**RECORD, "propertyNames": {"const": "x"}}, [{"x": 1}], [{"z": 1}]),
    ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "x"}, ["a", None], [5]),
    ({**REFERRED, "$defs": {"w": WORD}}, [{"a": "xy"}], [{"a": "xyz"}]),
    ({"type": "object", "properties": {"propertyNames": WORD, "nullable": WORD}}, [{"nullable": "a"}], [5]),
    ({"type": "array", "items": NULLABLE, "$schema": "http://json-schema.org/x"}, [["a", None]], [[1]]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), KEPT, ids=lambda value: str(value)[:40])
def test_what_a_grammar_can_say_is_kept(schema: dict[str, Any], right: list[Any], wrong: list[Any]) -> None:
    assert all(takes(schema, value) for value in right)
    assert not any(takes(schema, value) for value in wrong)
    assert warnings(schema) == []


FREE: list[tuple[dict[str, Any], Any, str]] = [
    (COLOUR, "x", '"hex-color"'),
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


PLACES = {name: {"type": "object", "properties": {"at": at}} for name, at in (("climb", COLOUR), ("sing", WORD))}
ODD_TOOLS = [function(name, parameters=schema) for name, schema in PLACES.items()]


def test_the_answer_says_what_is_free(server: Served) -> None:
    body = {"messages": HELLO, "tools": ODD_TOOLS, "tool_choice": "required", "max_tokens": 4}
    expected = ['tools: the parameters of climb: the grammar does not enforce "hex-color"']
    assert server.post(CHAT, **body).json()["warnings"] == expected
    first, *rest = stream(server, CHAT, **body)
    assert first["warnings"] == expected and not any("warnings" in chunk for chunk in rest)
    assert "warnings" not in server.post(CHAT, messages=HELLO, tools=ODD_TOOLS, max_tokens=4).json(), "nothing is kept"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": EITHER}}
    for more in ({"response_format": form}, {"structured_outputs": {"json": EITHER}}):
        done = server.post(TEXT, prompt="the", max_tokens=4, **more).json()
        assert done["warnings"] == [f"{next(iter(more))}: the grammar treats oneOf as anyOf"]
    assert "warnings" not in server.complete(structured_outputs={"json": WORD}, max_tokens=4)


def test_functions_may_be_chosen_in_all_of_openais_forms(server: Served) -> None:
    def grammar(choice: Any) -> str:
        response = server.post(CHAT, messages=HELLO, tools=ODD_TOOLS, tool_choice=choice, max_tokens=2)
        assert response.status_code == 200, response.text
        return server.engine.added[-1].params.grammar or ""

    def allowed(mode: str, *names: str) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(function, names)]}}

    one = grammar(function("sing"))
    assert "sing" in one and "climb" not in one
    assert grammar({"type": "function", "name": "sing"}) == one
    both = grammar("required")
    assert "sing" in both and "climb" in both
    assert grammar({"type": "required"}) == both == grammar(allowed("required", "sing", "climb"))
    assert "climb" not in grammar(allowed("required", "sing")) and grammar({"type": "auto"}) == ""
    server.engine.scripts["the cat"] = '<tool_call>\n{"name": "climb", "arguments": {}}\n</tool_call>'
    done = server.post(CHAT, messages=HELLO, tools=ODD_TOOLS, tool_choice=allowed("auto", "sing")).json()
    assert "tool_calls" not in done["choices"][0]["message"], "climb is not allowed"
    for wrong in (allowed("auto", "fly"), allowed("auto"), allowed("any", "sing"), {"type": "function"}):
        error = error_of(server.post(CHAT, messages=HELLO, tools=ODD_TOOLS, tool_choice=wrong))
        assert error["param"].startswith("tool_choice")
