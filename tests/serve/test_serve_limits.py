"""Limits that an answer meets: 400 before a stream begins or for a whole answer, and an error event in a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.fake_engine import LIMITED
from tests.helpers.serve_requests import CHAT, TEXT, error_of
from tests.helpers.served_model import Served, served

CODE = "grammar_too_complex"
SAID = [{"role": "user", "content": LIMITED}]
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": LIMITED},
    CHAT: {"messages": SAID},
    "/v1/responses": {"model": "fake", "input": LIMITED},
    "/v1/messages": {"model": "fake", "messages": SAID, "max_tokens": 50},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def spoken(event: dict[str, Any]) -> str:
    """Return the text of an event of any API."""
    if "choices" in event:
        [choice] = event["choices"]
        assert choice["finish_reason"] is None
        return choice["text"] if "text" in choice else choice["delta"].get("content", "")
    delta = event.get("delta", "")
    return delta if isinstance(delta, str) else delta.get("text", "")


@pytest.mark.parametrize("path", BODIES)
def test_a_limit_in_the_middle_of_an_answer(server: Served, path: str) -> None:
    whole = server.post(path, **BODIES[path])
    assert whole.status_code == 400 and len(whole.content) < 1000
    error = whole.json()["error"]
    assert "too complex at position" in error["message"] and error["type"] == "invalid_request_error"
    streamed = server.post(path, **BODIES[path], stream=True)
    *before, last = events(streamed.text)
    assert streamed.status_code == 200 and len("".join(map(spoken, before)).split()) > 1, "the tokens so far are sent"
    assert not any("response.completed" in str(event) or event.get("type") == "message_stop" for event in before)
    match path:
        case "/v1/messages":
            assert whole.json()["type"] == "error" and last["error"]["type"] == "invalid_request_error"
        case "/v1/responses":
            assert error["code"] == CODE and (last["type"], last["code"]) == ("error", CODE)
            assert [event["sequence_number"] for event in [*before, last]] == list(range(len(before) + 1))
        case _:
            assert error["code"] == last["error"]["code"] == CODE
    message = last["message"] if path == "/v1/responses" else last["error"]["message"]
    assert "too complex at position" in message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_limit_at_the_first_token_is_400_before_it(server: Served, path: str, stream: bool) -> None:
    body = BODIES[path] | {"structured_outputs": {"grammar": 'start: "a"{50000}'}, "stream": stream}
    error = error_of(server.post(path, **body))
    assert error["code"] == CODE and error["param"] == "structured_outputs"
    assert "too complex at its first token" in error["message"]


def test_requests_next_to_it_continue(server: Served) -> None:
    wanted = server.complete(max_tokens=30, seed=2)["choices"]
    assert error_of(server.post(TEXT, prompt=["the mat", LIMITED], n=2))["code"] == CODE
    assert server.complete(max_tokens=30, seed=2)["choices"] == wanted
    server.wait(lambda: (server.engine.num_running, server.engine.num_waiting) == (0, 0))
