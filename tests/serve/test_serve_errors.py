"""Answers to wrong requests, and limits that an answer meets, over real HTTP with a fake engine."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from serve.errors import ApiError, of_schema
from serve.schemas import ChatBody, CompletionBody, DetokenizeBody, Strict, TokenizeBody
from tests.helpers.fake_engine import LIMITED, REFUSED, SPOILT
from tests.helpers.serve_requests import CHAT, HELLO, TEXT, error_of
from tests.helpers.served_model import Served, served
from tests.serve import common
from tests.serve.common import bodies, sent, stream

SERVED = {"settings": {"max_queue": 28}}  # 36 places
BODIES: dict[str, dict[str, Any]] = {TEXT: {"prompt": "the"}, CHAT: {"messages": HELLO}}


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *[("temperature", v) for v in (-1, "1", True, [1], 1e9)],
        *[("n", v) for v in (0, 129, 1.5, "2", 10**18)],
        *[("max_tokens", v) for v in (-2, 2.5, "5", 2**31, 10**4299)],
        *[("max_completion_tokens", v) for v in (-2, "5", 10**4299)],
        *[("top_p", v) for v in (0, 1.1)],
        *[("top_k", v) for v in (-2, 0.5)],
        *[("min_p", v) for v in (-0.1, 2)],
        *[("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0)],
        *[("seed", v) for v in (-2, 2**63, 1.5)],
        *[("stop", v) for v in (["a"] * 65, 5, [5], "a" * 1001)],
        *[("stop_token_ids", v) for v in ("5", [1.5], [-1], [10**6], [10**4299])],
        *[("logit_bias", {key: 1}) for key in ("1.0", "01", " 1", "+1", "-1", "1000000", "9" * 4300)],
        *[("logit_bias", v) for v in ({"a": 1}, {"5": 101}, {"5": "1"}, [1], {str(i): 1 for i in range(1025)})],
        *[("best_of", 2), ("stream_options", {"include_usage": True}), ("stream", "yes"), ("token_details", 1)],
        ("stream_options", {"include_obfuscation": True}),
        *[("speculate", "no"), ("ignore_eos", 0), ("guided_json", {}), ("trust_remote_code", True), ("grammar", "x")],
    ],
    ids=lambda value: str(value)[:20],
)
def test_wrong_values_are_named(server: Served, param: str, value: Any) -> None:
    for path, body in BODIES.items():
        error = error_of(server.post(path, **{**body, param: value}))
        assert error["param"].partition(".")[0] == param and param in error["message"]
        assert error["type"] == "invalid_request_error"


def test_errors_name_parameters_and_nothing_of_ours(server: Served) -> None:
    """What the schema takes is sent to the server."""
    odd = [5, "", [], {}, [5], [""], [[]], [{}], {"a": 1}, {"type": "x"}, [{"type": "text", "text": 5}]]
    for kind, path in ((ChatBody, CHAT), (CompletionBody, TEXT), (TokenizeBody, "/tokenize")):
        needed = {"messages": HELLO, "max_tokens": 1} if path == CHAT else {}
        for at, name in enumerate(kind.model_fields):
            for value in odd[at % 2 :: 2]:
                body = {**needed, name: value}
                try:
                    kind.model_validate_json(json.dumps(body))
                except (ValidationError, ApiError) as refused:
                    error = (refused if isinstance(refused, ApiError) else of_schema(refused)).body["error"]
                else:
                    response = server.post(path, **body)
                    if response.status_code == 200:
                        continue
                    error = response.json()["error"]
                assert error["param"] and re.fullmatch(r"\w+(\.\w+)*", error["param"]), (name, value, error)
                assert not re.search(r"constrained|\[key\]|list\[|\.str\b|\.int\b", error["message"]), error
    for name in ("str", "list[int]", "[key]"):
        assert error_of(server.post(TEXT, prompt="the", **{name: 1}))["param"] == name


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [1] * 2000 + ["a"]}),
        (CompletionBody, {"prompt": [None] * 2000}),
        (ChatBody, {"messages": [{}] * 2000}),
        (ChatBody, {"messages": [{"role": "user", "content": [5] * 2000}]}),
        (DetokenizeBody, {"tokens": [None] * 2000}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_long_wrong_list_is_refused_at_its_first_error(kind: type[Strict], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        kind.model_validate_json(json.dumps(body))
    assert of_schema(raised.value).param and raised.value.error_count() <= 4


def test_the_name_of_a_nested_field_is_whole() -> None:
    function = {"name": "f", "parameters": {}, "no_such_key_of_a_function": 1}
    errors = []
    for more in ({"tools": [{"type": "function", "function": function}]}, {"stream_options": {"x" * 10_000: 1}}):
        with pytest.raises(ValidationError) as raised:
            ChatBody.model_validate({"messages": HELLO, **more})
        errors.append(of_schema(raised.value))
    assert "no_such_key_of_a_function" in errors[0].message, errors[0].message
    assert errors[1].param == f"stream_options.{'x' * 40} …" and len(errors[1].message) < 200


@pytest.mark.parametrize("inner", [False, True])
def test_very_many_unknown_keys_are_refused_all_at_once(inner: bool) -> None:
    """None of them is listed, which takes long."""
    many = {f"k{i}": 0 for i in range(2000)}
    data = json.dumps({"prompt": "the", **({"stream": True, "stream_options": many} if inner else many)})
    with pytest.raises(ValidationError) as raised:
        CompletionBody.model_validate_json(data)
    error = of_schema(Mock(error_count=raised.value.error_count, errors=None))
    assert error.status == 400 and "2000 wrong values or unknown keys" in error.message


WRONG_OUTPUTS: list[dict[str, Any]] = [
    *[{}, {"xml": "a"}, {"choice": []}, {"regex": "a", "choice": ["b"]}, {"regex": "("}, {"regex": "a" * 100_001}],
    *[{"grammar": wrong} for wrong in ("start: foo", "start: A\nA: /a/ & /b/")],
    *[{"json": wrong} for wrong in ({"type": "nonsense"}, {"x-guidance": 5})],
]
USER, PICTURE = {"role": "user", "content": "x"}, {"type": "image_url", "image_url": {}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *[({"prompt": prompt}, "prompt") for prompt in ("", [], [[]], [""], 5, None, [1, "a"], [-1], [[1], [10**6]])],
        *[({"prompt": [10**30]}, "prompt"), ({}, "prompt"), ({"prompt": "the", "logprobs": True}, "logprobs")],
        ({"prompt": "the", "logprobs": 21}, "logprobs"),
        *[({"prompt": "the", "suffix": "end"}, "suffix"), ({"prompt": "the", "top_logprobs": 1}, "top_logprobs")],
        *[({"prompt": "the", "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens")],
        *[({"prompt": "the", "response_format": {"type": "yaml"}}, "response_format")],
        *[({"prompt": "the", "structured_outputs": wrong}, "structured_outputs") for wrong in WRONG_OUTPUTS],
        *[({"prompt": "the", "n": 128}, "n"), ({"prompt": ["the"] * 40}, "n")],
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_completions(server: Served, body: dict[str, Any], param: str) -> None:
    assert error_of(server.post(TEXT, **body))["param"] == param


@pytest.mark.parametrize(
    ("more", "param"),
    [
        *[({"messages": messages}, "messages") for messages in ([], None, "hello", [5], [{}])],
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        *[({"messages": [USER | more]}, "messages") for more in ({"tool_call_id": "a"}, {"tool_calls": [{}]})],
        *[({"messages": [USER | {"content": content}]}, "messages") for content in (None, [PICTURE])],
        *[({"logprobs": 2}, "logprobs"), ({"top_logprobs": 2}, "top_logprobs")],
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"echo": True}, "echo"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_chats(server: Served, more: dict[str, Any], param: str) -> None:
    error = error_of(server.post(CHAT, **{"messages": HELLO, **more}))
    assert error["param"] == param or (param == "messages" and error["param"].startswith("messages"))
    assert "validation" not in error["message"], "these are the validator's words"


@pytest.mark.parametrize(
    "body",
    [
        *[b"", b"{", b"[]", b"5", b"null", b'"text"', b"\xff\xfe{}", b"\x00", b'{"prompt": "a"', b"{'prompt': 'a'}"],
        *[b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
        *[b'{"prompt": "\\ud800"}', b'{"prompt": "the", "\\ud800": 1}', b'{"prompt": "the", "user": "\\udc00"}'],
        *[b'{"prompt": "the", "temperature": %s}' % v for v in (b"NaN", b"1e999", b"-Infinity", b"9" * 5000)],
        *[b'{"prompt": "the", "seed": %s}' % (b"9" * 5000), b'{"prompt": "the", "max_tokens": 1e999}'],
        b'{"prompt": "the", "metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    ids=lambda body: body[:30].decode("latin-1"),
)
def test_hostile_bodies_are_wrong_requests(server: Served, body: bytes) -> None:
    for path in (TEXT, CHAT, "/tokenize", "/detokenize", "/predict"):
        error_of(server.http.post(path, content=body, headers={"content-type": "application/json"}))
    assert server.http.get("/health").status_code == 200


def test_special_characters_do_no_harm(server: Served) -> None:
    prompt = "\x00 \u202e \ud83d\ude42".encode("utf-16", "surrogatepass").decode("utf-16")
    assert server.post(TEXT, prompt=prompt, echo=True).json()["choices"][0]["text"].startswith(prompt)


def test_a_prompt_above_the_context_is_told_both_numbers(server: Served) -> None:
    import openai

    for body in ({"prompt": [5] * 300}, {"prompt": [5] * 256}, {"prompt": [5] * 200, "max_tokens": 57, "stream": True}):
        error = error_of(server.post(TEXT, **body))
        assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
        assert "256" in error["message"] and str(len(body["prompt"])) in error["message"]
    assert server.post(TEXT, prompt=[5] * 200, max_tokens=56).status_code == 200
    with pytest.raises(openai.BadRequestError) as raised:
        server.openai().chat.completions.create(model="fake", messages=HELLO, max_tokens=10_000)  # type: ignore
    assert raised.value.code == "context_length_exceeded"


def test_what_the_engine_refuses_is_a_wrong_request(server: Served) -> None:
    assert REFUSED in error_of(server.post(TEXT, prompt=["the cat", f"a {REFUSED}"], stream=True))["message"]
    assert (server.engine.num_running, server.engine.num_waiting) == (0, 0), "nothing of it runs on"
    server.complete()


def test_a_request_without_numbers_fails_alone() -> None:
    """Whole or in a stream, with another one, and it is counted."""
    failed = 'sharesd:request_failure_total{engine="0",model_name="fake"}'
    said = [{"role": "user", "content": SPOILT}]
    asked: dict[str, dict[str, Any]] = {TEXT: {"prompt": SPOILT, "seed": 1}, CHAT: {"messages": said, "seed": 1}}
    with served(settings={"max_batch": 2, "max_queue": 2}, delay=0.01) as server:
        whole = server.complete(max_tokens=200, seed=2)["choices"]
        with ThreadPoolExecutor() as pool:
            other = pool.submit(server.complete, max_tokens=200, seed=2)
            for path, body in asked.items():
                error = error_of(server.post(path, **body, logprobs=1 if path == TEXT else True), 500)
                assert "not numbers at position" in error["message"] and error["code"] == "logits_not_numbers"
                *found, last = stream(server, path, **body, token_details=True)
                assert last == {"error": error}
                parts = [event["choices"][0] for event in found]
                num_tokens = sum(len(part["tokens"]) for part in parts)
                assert num_tokens == server.engine.added[-1].position, "those of the last round, too"
                assert not any(part["finish_reason"] for part in parts)
            assert other.result()["choices"] == whole
        assert server.metrics()[failed] == 4
        server.wait(lambda: (server.engine.num_running, server.engine.num_waiting) == (0, 0))
        assert server.http.get("/health").status_code == 200


def test_unknown_models_paths_and_methods(server: Served) -> None:
    assert error_of(server.post(TEXT, model="gpt-4", prompt="the"), 404)["code"] == "model_not_found"
    assert error_of(server.post("/tokenize", model="gpt-4", prompt="the"), 404)["param"] == "model"
    error_of(server.http.get("/v1/nothing"), 404)
    refused = server.http.get(TEXT)
    assert error_of(refused, 405) and refused.headers["allow"] == "POST"
    error_of(server.http.post(TEXT, content=b"prompt=the"), 415)


def test_large_bodies_are_refused_and_the_connection_survives_other_errors() -> None:
    with served(settings={"max_body": 2000}) as server:
        error_of(server.post(TEXT, prompt="a" * 3000), 413)
        for chunks, status in (([b" " * 100] * 100, 413), ([b'{"pro', b'mpt": ', b'"the cat"}'], 200)):
            done = server.http.post(TEXT, content=iter(chunks), headers={"content-type": "application/json"})
            assert done.status_code == status, "chunked bodies are as good as others"
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:  # one connection: a wrong request, then a right one
            for body in (b"{}", b'{"prompt": "the cat"}'):
                head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
                raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
                assert raw.recv(4096).startswith(b"HTTP/1.1 100 ")
                raw.sendall(body)
                answer = b""
                while b"}" not in answer[-1:]:
                    answer += raw.recv(4096)
                assert answer.startswith(b"HTTP/1.1 400" if body == b"{}" else b"HTTP/1.1 200")


def rest_of(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(4096), b""))


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with served(settings={"body_timeout": 0.2}) as server, sent(server, b'{"prompt":', length=100) as sock:
        head, _, body = rest_of(sock).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ") and b"\r\nconnection: close" in head
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_body_that_does_not_come_ends_with_the_server(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with served() as server:
        sock = sent(server, b'{"prompt":', length=100)
        server.http.get("/version")  # by now the other request has begun
    with sock:
        assert rest_of(sock).startswith(b"HTTP/1.1 503 ")
    assert "status=503" in capfd.readouterr().err
    assert not any(record.exc_info for record in caplog.records)


LIMITED_BODIES, CODE = bodies(LIMITED), "grammar_too_complex"


@pytest.mark.parametrize("path", LIMITED_BODIES)
def test_a_limit_in_the_middle_of_an_answer(server: Served, path: str) -> None:
    whole = server.post(path, **LIMITED_BODIES[path])
    assert whole.status_code == 400 and len(whole.content) < 1000
    error = whole.json()["error"]
    assert "too complex at position" in error["message"] and error["type"] == "invalid_request_error"
    streamed = server.post(path, **LIMITED_BODIES[path], stream=True)
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    *before, last = [json.loads(line) for line in lines if line != "[DONE]"]
    spoken = "".join(re.findall(r'"(?:text|content|delta)":"([^"]+)"', streamed.text))
    assert streamed.status_code == 200 and len(spoken.split()) > 1, "the tokens so far are sent"
    assert '"finish_reason":"' not in streamed.text
    assert not any("response.completed" in str(event) or event.get("type") == "message_stop" for event in before)
    match path:
        case common.MESSAGES:
            assert whole.json()["type"] == "error" and last["error"]["type"] == "invalid_request_error"
        case common.RESPONSES:
            assert error["code"] == CODE and (last["type"], last["code"]) == ("error", CODE)
            assert [event["sequence_number"] for event in [*before, last]] == list(range(len(before) + 1))
        case _:
            assert error["code"] == last["error"]["code"] == CODE
    message = last["message"] if path == common.RESPONSES else last["error"]["message"]
    assert "too complex at position" in message


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_limit_at_the_first_token_is_400_before_it(server: Served, path: str) -> None:
    for streamed in (False, True):
        outputs = {"grammar": 'start: "a"{50000}'}
        error = error_of(server.post(path, **BODIES[path], structured_outputs=outputs, stream=streamed))
        assert error["code"] == CODE and error["param"] == "structured_outputs"
        assert "too complex at its first token" in error["message"]
