"""Calls of functions in the text of an answer, whatever pieces it comes in; and how chat templates ask for them."""

from __future__ import annotations

import json

import pytest

from serve.parsing.tool_calls import CallReader
from serve.parsing.tool_format import FORMATS, HERMES, LLAMA, MISTRAL, format_of

NAMES = {"get_weather", "add"}
Found = tuple[str, list[tuple[str, str]]]
"""Content, and names and arguments of calls."""


def read(form: str, pieces: list[str], max_calls: int | None = None, must: bool = False) -> Found:
    """What a stream of these pieces comes to, put together as clients do."""
    reader, content, calls = CallReader(FORMATS[form], NAMES, max_calls=max_calls, must=must), "", []
    for place, piece in enumerate(pieces):
        found = reader.push(piece, last=place == len(pieces) - 1)
        content += found.content
        for part in found.calls:
            if part.name is not None:
                assert part.index == len(calls)
                calls.append((part.name, ""))
            assert part.index == len(calls) - 1, "calls come one after the other"
            calls[-1] = calls[-1][0], calls[-1][1] + part.arguments
    return content, calls


WEATHER = '{"name": "get_weather", "arguments": {"city": "Par}is \\"]", "days": [1, {"a": 2}]}}'
CITY = '{"city": "Par}is \\"]", "days": [1, {"a": 2}]}'
ADD = '{"name": "add", "arguments": {}}'
ODD = '{ "arguments": {"city": "é"}, "name": "get_weather"}'
OTHER = '{"name": "launch", "arguments": {"city": "x"}}'
TWO = f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>"

CASES: list[tuple[str, str, Found]] = [
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", ("", [("get_weather", CITY)])),
    ("hermes", f"I look.\n<tool_call>{WEATHER}</tool_call>\n", ("I look.", [("get_weather", CITY)])),
    ("hermes", f"\n{TWO}", ("", [("add", "{}"), ("get_weather", CITY)])),
    ("hermes", f"<tool_call>{ODD}</tool_call>", ("", [("get_weather", '{"city": "é"}')])),
    ("hermes", f"<tool_call>{ADD}</tool_call>\n\nand so on ", ("\n\nand so on ", [("add", "{}")])),
    ("hermes", f"<tool_call>{ADD[:-1]}</tool_call>", ("", [("add", "{}")])),  # a brace is missing
    ("hermes", f"<tool_call>{ADD}<tool_call>{ADD}", ("", [("add", "{}"), ("add", "{}")])),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1', ("", [("add", '{"a": 1')])),  # cut by max_tokens
    ("hermes", '<tool_call>{"name":"add","arguments":{}, "id": {"x": "}"}}</tool_call> ', ("", [("add", "{}")])),
    ("hermes", "a <tool_cal> < b ", ("a <tool_cal> < b ", [])),
    ("hermes", f"a\n<tool_call>\n{OTHER}\n</tool_call>", (f"a\n<tool_call>\n{OTHER}\n</tool_call>", [])),
    ("hermes", f"<tool_call>no <tool_call>{ADD}</tool_call>", ("<tool_call>no", [("add", "{}")])),
    ("hermes", '<tool_call>{"name": "add"', ('<tool_call>{"name": "add"', [])),
    ("hermes", '<tool_call>{"name": "add", "arguments": 5}', ('<tool_call>{"name": "add", "arguments": 5}', [])),
    ("hermes", "<tool_call>{]}</tool_call>", ("<tool_call>{]}</tool_call>", [])),
    ("hermes", "  no call at all\n", ("  no call at all\n", [])),
    ("hermes", "", ("", [])),
    ("llama", WEATHER.replace("arguments", "parameters"), ("", [("get_weather", CITY)])),
    ("llama", f"\n{WEATHER}; {ADD}\n{ADD} ", ("", [("get_weather", CITY), ("add", "{}"), ("add", "{}")])),
    ("llama", '{"type": "function", "name": "add", "parameters": {"a": 1}}', ("", [("add", '{"a": 1}')])),
    ("llama", f"{ADD} and so on ", (" and so on ", [("add", "{}")])),
    ("llama", f"{ADD}; {{5}} ", ("; {5} ", [("add", "{}")])),
    ("llama", f"say {ADD}", (f"say {ADD}", [])),  # a call begins the answer
    ("llama", ' {"colours": ["red"]}\n', (' {"colours": ["red"]}\n', [])),
    ("llama", OTHER, (OTHER, [])),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {ADD}]", ("", [("get_weather", CITY), ("add", "{}")])),
    ("mistral", f"Well. [TOOL_CALLS][{ADD}]", ("Well.", [("add", "{}")])),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "abcdefghi"}]', ("", [("add", "{}")])),
    ("mistral", f"[TOOL_CALLS] {ADD}", ("", [("add", "{}")])),
    ("mistral", f"[TOOL_CALLS] [{OTHER}] x", (f"[TOOL_CALLS] [{OTHER}] x", [])),
    ("mistral", "[TOOL_CALLS]add[ARGS]{}", ("[TOOL_CALLS]add[ARGS]{}", [])),
]


@pytest.mark.parametrize(("form", "text", "found"), CASES, ids=[f"{form}-{i}" for i, (form, *_) in enumerate(CASES)])
def test_calls_are_found_wherever_the_text_is_cut(form: str, text: str, found: Found) -> None:
    assert read(form, [text]) == found
    assert read(form, [*text, ""]) == found, "character by character"
    for first in range(len(text) + 1):
        assert read(form, [text[:first], text[first:]]) == found, first
        assert read(form, [text[:first], text[first : first + 3], text[first + 3 :]]) == found, first


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f"<tool_call>\n{ADD}\n</tool_call>\n"),
        ("llama", f"{ADD}; {ADD}"),
        ("mistral", f"[TOOL_CALLS][{ADD}, {ADD}]"),
    ],
)
def test_of_a_call_that_is_cut_early_nothing_is_shown(form: str, text: str) -> None:
    for num in range(len(text) + 1):
        content, calls = read(form, [*text[:num], ""], must=True)
        assert not content and all(name == "add" for name, _ in calls)
        assert read(form, [f"{text}{text[:num]}", ""])[0] == "" or form != "hermes"
    assert read("hermes", [f"<tool_call>{ADD}</tool_call> a <tool"]) == (" a", [("add", "{}")])


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(HERMES, NAMES)
    head = '<tool_call>\n{"name": "add", "arguments": {"text": "'
    seen = [reader.push(piece, last=False) for piece in (head[:-12], head[-12:], "once upon", " a time")]
    found = [[(part.name, part.arguments) for part in read.calls] for read in seen]
    assert found == [[], [("add", '{"text": "')], [(None, "once upon")], [(None, " a time")]]
    assert not any(read.content for read in seen)


def test_text_before_a_call_is_not_held_back() -> None:
    reader = CallReader(MISTRAL, NAMES)
    shown = [reader.push(piece, last=False).content for piece in ("I ", "look [", "here", " [TOOL")]
    assert shown == ["I", " look", " [here", ""]


def test_what_follows_the_calls_that_are_wanted_is_left_out() -> None:
    text = f"a <tool_call>{ADD}</tool_call> b <tool_call>{WEATHER}</tool_call> c"
    for first in range(len(text) + 1):
        assert read("hermes", [text[:first], text[first:]], 1) == ("a", [("add", "{}")])
    assert read("mistral", [f"[TOOL_CALLS] [{ADD}, {ADD}]"], 1) == ("", [("add", "{}")])


def test_a_long_object_is_read_once() -> None:
    reader = CallReader(LLAMA, NAMES)
    text = json.dumps({"words": ["the cat"] * 20_000})
    pieces = [reader.push(text[at : at + 4], last=False).content for at in range(0, len(text), 4)]
    assert "".join(pieces) == text and not any(pieces[:-1])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (r'"<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"', "hermes"),
        ("""{{ 'In the format {"name": function name, "parameters": dictionary of its arguments}. ' }}""", "llama"),
        ("<tool_call>\n<function=example>\n<parameter=x>", None),
        ("<tool_call>{{ name }}\n<arg_key>", None),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        (None, None),
    ],
)
def test_the_format_is_the_templates(template: str | None, name: str | None) -> None:
    found = format_of(template)
    assert (found and found.name) == name
    assert format_of(template, "llama") is LLAMA
