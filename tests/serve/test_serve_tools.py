"""Tools in chats, over real HTTP: a fake engine says what it is told, and a tiny model must call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.command import load_model
from sharesd.config import EngineConfig, Mode
from tests.helpers.served_model import Served, served
from tests.helpers.tiny_models import make_checkpoint
from tests.helpers.tiny_tokenizer import CHAT_TEMPLATE, TOOL_TEMPLATE
from tests.serve.test_serve import CHAT, HELLO, error_of
from tests.serve.test_serve_streams import stream

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["the red mat", "the blue sky"]}},
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "the red mat", "days": 2}}\n</tool_call>'
ARGUMENTS = {"city": "the red mat", "days": 2}
SCRIPTS = {
    "the weather": f"I look.\n{CALL}",
    "both": f"{CALL}\n<tool_call>\n" + '{"name": "get_time", "arguments": {}}\n</tool_call>',
    "nonsense": "<tool_call>nothing</tool_call>",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(template=TOOL_TEMPLATE, max_context=2048) as running:
        running.engine.scripts |= SCRIPTS
        yield running


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
    server.engine.added.clear()
    client.chat.completions.create(model="fake", messages=messages, tools=TOOLS, max_tokens=5)  # type: ignore
    [request] = server.engine.added
    shown = server.engine.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    assert json.dumps(WEATHER) in shown and '"name": "get_time", "parameters": {"type": "object"' in shown
    assert f"assistant\nI look.{CALL}<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>" in shown


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("question", ["the weather", "both", "nonsense", "the cat"])
def test_a_stream_of_calls_is_the_whole_answer(server: Served, question: str, speculate: bool) -> None:
    body = asked(question, max_tokens=300, speculate=speculate)
    whole = server.post(CHAT, **body).json()["choices"][0]
    message: dict[str, Any] = {"role": None, "content": "", "tool_calls": []}
    reasons = []
    for chunk in stream(server, CHAT, **body):
        delta = chunk["choices"][0]["delta"]
        reasons.append(chunk["choices"][0]["finish_reason"])
        assert "role" not in delta or message["role"] is None
        message["role"] = delta.get("role", message["role"])
        message["content"] += delta.get("content", "")
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
    assert expected["content"] is None if question == "both" else expected["content"]
    if not speculate and said:
        num_pieces = sum("tool_calls" in chunk["choices"][0]["delta"] for chunk in stream(server, CHAT, **body))
        assert num_pieces > 5, "arguments come as they are written"


def test_unparsable_markup_is_content(server: Served) -> None:
    done = server.post(CHAT, **asked("nonsense")).json()["choices"][0]
    assert (done["message"]["content"], done["finish_reason"]) == ("<tool_call>nothing</tool_call>", "stop")


def test_one_call_where_no_more_are_wanted(server: Served) -> None:
    done = server.post(CHAT, **asked("both", parallel_tool_calls=False)).json()["choices"][0]
    assert [call["function"]["name"] for call in done["message"]["tool_calls"]] == ["get_weather"]


def test_a_call_that_is_cut_ends_with_length(server: Served) -> None:
    done = server.post(CHAT, **asked("both", max_tokens=70)).json()["choices"][0]
    assert done["finish_reason"] == "length" and done["message"]["tool_calls"]


def test_the_model_is_not_shown_tools_that_it_may_not_call(server: Served) -> None:
    server.engine.added.clear()
    done = server.post(CHAT, **asked("both", tool_choice="none")).json()["choices"][0]
    assert done["message"]["content"].startswith("<tool_call>") and "tool_calls" not in done["message"]
    assert "get_weather" not in server.engine.tokenizer.decode(server.engine.added[0].prompt_ids)


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
    assert [end.rpartition("the cat")[2] for end in ends] == [
        "<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n<|im_start|>assistant\nHm",
        "<|im_end|>\n",
    ]
    for name in ("think", "messages", "tools"):
        error = error_of(server.post(CHAT, messages=HELLO, chat_template_kwargs={name: 1}))
        assert error["param"] == "chat_template_kwargs" and name in error["message"] and "thinking" in error["message"]


def function(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


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
        ({"tools": [function(parameters={"properties": 5})], "tool_choice": "required"}, "tools"),
        ({"tools": [function(parameters={"x-guidance": 5})], "tool_choice": "required"}, "tools"),
        ({"tools": [function(parameters={"enum": ["x" * 100_000]})], "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, None),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALLED]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "f", "arguments": "5"}}]}
                ]
            },
            "messages",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_tools_are_named(server: Served, more: dict[str, Any], param: str | None) -> None:
    error = error_of(server.post(CHAT, **{"messages": HELLO, **more}))
    assert (error["param"] or "").partition(".")[0] == (param or "")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHAT_TEMPLATE, "no place for them"),
        (CHAT_TEMPLATE + "{% if tools %}{% endif %}", "--tool-format hermes|llama|"),
    ],
)
def test_a_template_without_tools_is_told(template: str, said: str) -> None:
    with served(template=template) as server:
        error = error_of(server.post(CHAT, messages=HELLO, tools=TOOLS))
        assert error["param"] == "tools" and said in error["message"]
        assert server.post(CHAT, messages=HELLO, tools=TOOLS, tool_choice="none", max_tokens=1).status_code == 200
        said_before = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALLED]}]
        assert error_of(server.post(CHAT, messages=said_before))["param"] == "messages"


def test_the_format_may_be_given() -> None:
    template = CHAT_TEMPLATE + "{% if tools %}{% endif %}"
    with served(settings={"tool_format": "llama"}, template=template) as server:
        server.engine.scripts["the cat"] = '{"name": "get_time", "parameters": {}}'
        done = server.post(CHAT, messages=HELLO, tools=TOOLS).json()["choices"][0]
        assert done["message"]["tool_calls"][0]["function"] == {"name": "get_time", "arguments": "{}"}
        strict = [function(strict=True)]
        assert "strict" in error_of(server.post(CHAT, messages=HELLO, tools=strict))["message"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny"), context=1024)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TOOL_TEMPLATE}))
    return folder


CHOICES: list[dict[str, Any]] = [
    {"tool_choice": "required", "temperature": 0},
    {"tool_choice": "required", "temperature": 1.0, "n": 2},
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": NAMED, "temperature": 1.3},
]
ANSWERS: dict[Mode, list[Any]] = {}


@pytest.mark.parametrize("mode", ["naive", "share", "suffix", "hybrid"])
def test_a_model_that_must_call_does(folder: Path, mode: Mode) -> None:
    config = EngineConfig(target=str(folder), mode=mode, max_batch=2)
    with served(lambda: load_model(config, mode, None), settings={"max_batch": 2}) as server:
        server.wait(lambda: server.http.get("/health").status_code == 200, 60)
        found = []
        for more in CHOICES:
            done = server.post(CHAT, **asked("why is the sky blue", max_tokens=300, **more)).json()
            for choice in done["choices"]:
                assert choice["message"]["content"] is None
                calls = [call["function"] for call in choice["message"]["tool_calls"]]
                assert choice["finish_reason"] == "tool_calls" or len(calls) > 2, "whole, unless there are many"
                for call in calls[: None if choice["finish_reason"] == "tool_calls" else -1]:
                    check(call)
                found.append(calls)
        assert len(found[3]) == len(found[4]) == 1 and found[4][0]["name"] == "get_weather"
        streamed: dict[int, str] = {}
        for chunk in stream(server, CHAT, **asked("why is the sky blue", max_tokens=300, **CHOICES[1])):
            choice = chunk["choices"][0]
            for part in choice["delta"].get("tool_calls", ()):
                said = part["function"].get("name", "") + part["function"]["arguments"]
                streamed[choice["index"]] = streamed.get(choice["index"], "") + said
        assert streamed == {i: "".join(c["name"] + c["arguments"] for c in found[1 + i]) for i in range(2)}
        strict = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]
        free = server.post(CHAT, **asked("why is the sky blue", max_tokens=40, tools=strict)).json()["choices"][0]
        assert free["message"]["content"], "a model that may call need not"
        ANSWERS[mode] = [*found, free["message"]["content"]]
    assert ANSWERS[mode] == next(iter(ANSWERS.values())), "the same in all modes"


def check(call: dict[str, str]) -> None:
    """It is valid."""
    arguments = json.loads(call["arguments"])
    if call["name"] == "get_time":
        assert arguments == {}
        return
    assert call["name"] == "get_weather" and set(arguments) == {"city", "days"}
    assert arguments["city"] in ("the red mat", "the blue sky") and 1 <= arguments["days"] <= 9
