"""Anthropic's API by its official client, over real HTTP with a fake engine."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.helpers.fake_engine import SPOILT
from tests.helpers.served_model import Served, served
from tests.serve.common import prompt_of
from tests.serve.test_responses_api import CALL, CITY, SCRIPTS, SERVED, TEMPLATE  # noqa: F401

PATH = "/v1/messages"
TOOL = {"name": "get_weather", "description": "d", "input_schema": CITY, "cache_control": {"type": "ephemeral"}}
HELLO = [{"role": "user", "content": "the mat is"}]


def client_of(server: Served, key: str = "none") -> Any:
    import anthropic  # takes a second

    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def said(server: Served, **more: Any) -> Any:
    return client_of(server).messages.create(**{"model": "fake", "max_tokens": 50, "messages": HELLO, **more})


def test_a_text_has_the_clients_shape(server: Served) -> None:
    system = [{"type": "text", "text": "be on the mat", "cache_control": {"type": "ephemeral"}}]
    done = said(server, system=system)
    assert (done.type, done.role, done.model, done.stop_reason) == ("message", "assistant", "fake", "end_turn")
    assert [(block.type, block.text) for block in done.content] == [("text", "the cat sat on the mat")]
    assert "<|im_start|>system\nbe on the mat<|im_end|>\n<|im_start|>user\nthe mat is<|im_end|>" in prompt_of(server)
    again = said(server, system=system)
    for usage in (done.usage, again.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == len(server.engine.added[-1].prompt_ids)
    assert again.usage.cache_read_input_tokens > 0


def test_stop_reasons(server: Served) -> None:
    assert said(server, max_tokens=2).stop_reason == "max_tokens"
    stopped = said(server, stop_sequences=["zzz", " on"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " on")
    assert stopped.content[0].text == "the cat sat"


def test_thinking_and_calls_are_blocks_and_are_taken_back(server: Served) -> None:
    talk: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "the weather"}]}]
    done = said(server, max_tokens=300, messages=talk, tools=[TOOL])
    thought, text, call = done.content
    assert (thought.type, thought.thinking) == ("thinking", "why is it red")
    assert (text.text, call.type, call.name, call.input) == ("I look.", "tool_use", "get_weather", {"city": "the mat"})
    assert done.stop_reason == "tool_use"
    result = [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}]
    talk += [{"role": "assistant", "content": done.content}, {"role": "user", "content": result}]
    said(server, messages=talk, tools=[TOOL])
    turn = f"assistant\n<think>why is it red</think>I look.{CALL}<|im_end|>"
    assert f"{turn}\n<|im_start|>tool\nsunny<|im_end|>" in prompt_of(server)


@pytest.mark.parametrize("question", ["the weather", "the mat is", "the sky"])
def test_a_stream_is_the_whole_answer(server: Served, question: str) -> None:
    body: dict[str, Any] = {"model": "fake", "max_tokens": 300, "tools": [TOOL], "extra_body": {"temperature": 0}}
    body["messages"] = [{"role": "user", "content": question}]
    whole = client_of(server).messages.create(**body)
    with client_of(server).messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"

    def plain(message: Any) -> Any:
        blocks = [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]
        return [{k: v for k, v in b.items() if k != "parsed_output"} for b in blocks], message.stop_reason

    assert plain(final) == plain(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_choices_of_tools(server: Served) -> None:
    body: dict[str, Any] = {"model": "fake", "max_tokens": 4, "messages": HELLO, "tools": [TOOL]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        assert server.post(PATH, **body, tool_choice=choice).status_code == 200
        assert "get_weather" in (server.engine.added[-1].params.grammar or "")
    assert server.post(PATH, **body, tool_choice={"type": "none"}).status_code == 200
    assert "get_weather" not in prompt_of(server)


def test_the_last_turn_of_an_assistant_is_continued(server: Served) -> None:
    said(server, messages=[*HELLO, {"role": "assistant", "content": "the cat"}])
    assert prompt_of(server).endswith("<|im_start|>assistant\nthe cat")


def test_tokens_are_counted_as_they_are_read(server: Served) -> None:
    more = {"tools": [TOOL], "system": "the red mat"}
    counted = client_of(server).messages.count_tokens(model="fake", messages=HELLO, **more)
    said(server, **more)
    assert counted.input_tokens == len(server.engine.added[-1].prompt_ids)


def error_of(response: Any, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == kind
    return body["error"]["message"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": None}, "max_tokens"),
        ({"unknown_key": 1}, "unknown_key"),
        ({"messages": []}, "messages"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Served, more: dict[str, Any], named: str) -> None:
    response = server.post(PATH, **{"model": "fake", "max_tokens": 4, "messages": HELLO, **more})
    assert named in error_of(response, 400, "invalid_request_error")


def test_errors_are_the_clients(server: Served) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError):
        said(server, model="other")
    spoilt = [{"role": "user", "content": SPOILT}]
    with pytest.raises(anthropic.InternalServerError, match="not numbers"):
        said(server, messages=spoilt)
    with (
        pytest.raises(anthropic.APIStatusError, match="not numbers"),
        client_of(server).messages.stream(model="fake", max_tokens=9, messages=spoilt) as stream,
    ):
        stream.get_final_message()


@pytest.mark.parametrize(
    ("words", "max_tokens", "message"),
    [
        (3000, 4, r"prompt is too long: \d{5} tokens > 2047 maximum"),
        (3, 5000, r"input length and `max_tokens` exceed context limit: \d+ \+ 5000 > 2048, decrease .* and try again"),
    ],
)
def test_an_overflow_has_the_words_that_clients_read(server: Served, words: int, max_tokens: int, message: str) -> None:
    talk = [{"role": "user", "content": "the cat " * words}]
    response = server.post(PATH, model="fake", max_tokens=max_tokens, messages=talk)
    assert re.fullmatch(message, error_of(response, 400, "invalid_request_error"))


def test_a_key_may_come_in_anthropics_header() -> None:
    import anthropic

    with served(template=TEMPLATE, settings={"api_keys": ("secret",)}) as running:
        message = {"model": "fake", "max_tokens": 2, "messages": HELLO}
        assert client_of(running, "secret").messages.create(**message).content
        with pytest.raises(anthropic.AuthenticationError):
            client_of(running, "wrong").messages.create(**message)
        error_of(running.post(PATH, **message), 401, "authentication_error")
