"""Requests and tools that clients send: done, or refused in words about the request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.command import load_model
from serve.parsing.tool_calls import CallReader
from serve.parsing.tool_format import format_of
from sharesd.config import EngineConfig
from sharesd.models.tokenizer import Tokenizer
from tests.cases.inputs import ANSWER, PLAIN, backend
from tests.cases.test_checkpoints import NOT_NUMBERS, inf_row
from tests.helpers.served_model import Served, served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "the moon"}
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"tree": {"type": "string", "maxLength": 4}},
    "required": ["tree"],
    "additionalProperties": False,
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "climb", "arguments": '{"tree": "old"}'}}
HERMES = (
    "{% if tools %}<|begin|>system: {% for t in tools %}{{ t | tojson }}{% endfor %} Call them as <tool_call>\n"
    '{"name": N, "arguments": O}\n</tool_call><|close|>{% endif %}'
    "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|close|>{% endfor %}" + ANSWER
)


def tool(name: str = "climb", parameters: dict[str, Any] = ARGUMENTS) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(template=HERMES, max_context=2048) as running:
        yield running


def said(**more: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": "a bird", **more}, USER]}


CACHED = {"type": "text", "text": "sing", "cache_control": {"type": "ephemeral"}}
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "reasoning of null": (CHAT, said(reasoning_content=None)),
    "reasoning": (CHAT, said(reasoning_content="the bird")),
    "cache_control": (CHAT, {"messages": [{"role": "system", "content": [CACHED]}, USER]}),
    "max_tokens of -1": (COMPLETIONS, {"prompt": "the", "max_tokens": -1}),
    "max_completion_tokens of -1": (CHAT, {"messages": [USER], "max_completion_tokens": -1}),
    "seed of -1": (COMPLETIONS, {"prompt": "the", "seed": -1, "max_tokens": 4}),
    "an empty stop": (COMPLETIONS, {"prompt": "the", "stop": "", "max_tokens": 4}),
    "an empty stop next to another": (COMPLETIONS, {"prompt": "the", "stop": ["", "x"], "max_tokens": 4}),
    "min_tokens": (COMPLETIONS, {"prompt": "the", "min_tokens": 3, "max_tokens": 4}),
    "top_logprobs of 0": (CHAT, {"messages": [USER], "top_logprobs": 0, "max_tokens": 4}),
    "top_logprobs of 0 with false": (
        CHAT,
        {"messages": [USER], "top_logprobs": 0, "logprobs": False, "max_tokens": 4},
    ),
    "an unknown format": (
        CHAT,
        {
            "messages": [USER],
            "max_tokens": 4,
            "tool_choice": "required",
            "tools": [
                tool(parameters={"type": "object", "properties": {"at": {"type": "string", "format": "hex-color"}}})
            ],
        },
    ),
}
"""Dialects of other servers."""


@pytest.mark.parametrize("what", FIELDS)
def test_fields_that_clients_send_are_taken(server: Served, what: str) -> None:
    path, body = FIELDS[what]
    response = server.post(path, **body)
    assert response.status_code == 200, response.text


def test_the_last_message_may_be_continued(server: Served) -> None:
    server.engine.added.clear()
    messages = [USER, {"role": "assistant", "content": "the old"}]
    body = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 1}
    assert server.post(CHAT, messages=messages, **body).status_code == 200
    shown = server.engine.tokenizer.decode(server.engine.added[0].prompt_ids, skip_special_tokens=False)
    assert shown.endswith("assistant: the old")


def test_evaluation_harnesses_find_the_tokenizer(server: Served) -> None:
    response = server.http.get("/tokenizer_info")
    assert response.status_code == 200
    assert {"eos_token", "bos_token", "pad_token", "chat_template"} <= response.json().keys()


def message_of(server: Served, **body: Any) -> str:
    response = server.post(CHAT, messages=[USER], max_tokens=4, **body)
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["files:read", "a b", "x" * 65])
def test_a_bad_name_of_a_tool_is_told_the_rule(server: Served, name: str) -> None:
    assert "64" in message_of(server, tools=[tool(name)])


def test_a_bad_tool_choice_is_told_in_plain_words(server: Served) -> None:
    message = message_of(server, tools=[tool()], tool_choice="any")
    assert message.startswith('tool_choice is "any"; give')


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_pictures_and_sounds_are_refused_by_name(server: Served, kind: str) -> None:
    parts = [{"type": "text", "text": "the moon"}, {"type": kind, kind: {"url": "data:,"}}]
    response = server.post(CHAT, messages=[{"role": "user", "content": parts}], max_tokens=4)
    assert response.status_code == 400
    assert f"has a part of type {kind}, but this model accepts only text" in response.json()["error"]["message"]


# Templates

NULL_CONTENT = (  # an assistant's turn with calls is written only where its content is none
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}<|begin|>assistant: CALLS"
    "{% for c in m.tool_calls %} {{ c.function.name }}({{ c.function.arguments }}){% endfor %}<|close|>{% else %}"
    "<|begin|>{{ m.role }}: {{ m.content }}<|close|>{% endif %}{% endfor %}" + ANSWER
)


def test_a_call_sent_back_with_null_content_stands_in_the_prompt() -> None:
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": "done"}
    back = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result]
    with served(template=NULL_CONTENT) as running:
        assert running.post(CHAT, messages=back, max_tokens=1).status_code == 200
        prompt = running.engine.added[0].prompt_ids
        assert "climb" in running.engine.tokenizer.decode(prompt, skip_special_tokens=False)
        running.engine.added.clear()
        back[1]["content"] = ""
        assert running.post(CHAT, messages=back, max_tokens=1).status_code == 200
        assert running.engine.added[0].prompt_ids == prompt


ONE_CALL = (
    '{% if tools %}Write {"name": N, "parameters": O}. {% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}'
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time, please') }}{% endif %}"
    '<|begin|>assistant: {"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|close|>'
    "{% else %}<|begin|>{{ m.role }}: {{ m.content }}<|close|>{% endif %}{% endfor %}" + ANSWER
)


def test_a_template_of_one_call_gets_one_call() -> None:
    call = '{"name": "climb", "parameters": {"tree": "old"}}'
    with served(template=ONE_CALL, max_context=2048) as running:
        running.engine.scripts |= {"the moon": f"{call}; {call}"}
        done = running.post(CHAT, messages=[USER], tools=[tool()], max_tokens=300).json()
        message = done["choices"][0]["message"]
        assert len(message["tool_calls"]) == 1
        results = [{"role": "tool", "tool_call_id": made["id"], "content": "done"} for made in message["tool_calls"]]
        again = running.post(CHAT, messages=[USER, message, *results], tools=[tool()], max_tokens=1)
        assert again.status_code == 200, again.text


CALLS = {  # words of the system prompt, and how a call is written
    "action_list": (
        'Tools are given as {"name": N, "parameters": SCHEMA}.',
        '<|ACTION|>[{"tool_name": "NAME", "parameters": ARGS}]<|/ACTION|>',
    ),
    "plural_tag": (
        "Never write <tool_call>; write a list.",
        '<tool_calls>[{"name": "NAME", "arguments": ARGS}]</tool_calls>',
    ),
    "invoke": (
        "Write calls inside <tool_call> and </tool_call>.",
        '<tool_call><invoke name="NAME"><args>ARGS</args></invoke></tool_call>',
    ),
    "pythonic": ('Tools are given as {"name": N, "parameters": SCHEMA}.', "<|python|>[NAME(**ARGS)]"),
}


def template_of(words: str, call: str) -> str:
    call = call.replace("NAME", "{{ c.function.name }}").replace("ARGS", "{{ c.function.arguments | tojson }}")
    system = "{% if tools %}<|begin|>system: " + words + " {% for t in tools %}{{ t | tojson }}{% endfor %}<|close|>"
    turns = "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    return f"{system}{{% endif %}}{turns}{call}{{% endfor %}}<|close|>{{% endfor %}}{ANSWER}"


@pytest.mark.parametrize("name", ["hermes", *CALLS])
def test_calls_that_a_template_writes_are_read_or_its_tools_refused(name: str) -> None:
    template = HERMES if name == "hermes" else template_of(*CALLS[name])
    form = format_of(template)
    if form is None:
        return
    tokenizer = Tokenizer(backend(), special={}, chat_template=template)
    call = {"type": "function", "function": {"name": "climb", "arguments": {"tree": "old"}}}
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    shown = tokenizer.render_chat(turns, False, tools=[tool()])
    written = shown.rpartition("assistant: ")[2].removesuffix("<|close|>")
    calls = CallReader(form, {"climb"}).push(written, last=True).calls
    assert "".join(part.name or "" for part in calls) == "climb"
    assert json.loads("".join(part.arguments for part in calls)) == {"tree": "old"}


def test_a_template_without_tools_has_no_format() -> None:
    assert format_of(PLAIN) is None


# Numbers


def test_logits_that_are_not_numbers_are_an_error_of_their_own(tmp_path: Path) -> None:
    config = EngineConfig(target=str(inf_row(tmp_path / "x")), device="cpu", max_context=64, max_batch=2)
    with served(lambda: load_model(config, "naive", None), {"mode": "naive"}) as running:
        running.wait(lambda: running.http.get("/health").status_code == 200)
        body = {"max_tokens": 4, "temperature": 0}
        for more in ({}, {"logprobs": 2}):
            response = running.post(COMPLETIONS, prompt="under the moon", **body, **more)
            assert response.status_code >= 500
            assert any(word in response.json()["error"]["message"] for word in NOT_NUMBERS.split("|"))
        assert running.post(COMPLETIONS, prompt="the river", **body).status_code == 200
