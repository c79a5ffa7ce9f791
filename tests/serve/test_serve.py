"""Answers of endpoints over real HTTP, with a fake engine."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi.responses import JSONResponse

from tests.helpers.fake_engine import make_tokenizer
from tests.helpers.serve_requests import CHAT, HELLO, TEXT, error_of
from tests.helpers.served_model import Served, served
from tests.serve.common import bodies

SERVED = {"settings": {"max_queue": 28}}  # 36 places


@pytest.mark.smoke
def test_a_completion_has_openais_shape(server: Served) -> None:
    client = server.openai()
    done = client.completions.create(model="fake", prompt="the cat", max_tokens=7, seed=5)
    choice = done.choices[0]
    assert (done.object, done.model, choice.index, choice.finish_reason) == ("text_completion", "fake", 0, "length")
    assert len(choice.text.split()) == 7
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 7, 10)
    assert server.complete("the cat")["usage"]["completion_tokens"] == 16, "OpenAI's default"


def test_a_chat_has_openais_shape(server: Served) -> None:
    client = server.openai()
    done = client.chat.completions.create(model="fake", messages=HELLO, max_completion_tokens=5, seed=5)  # type: ignore
    choice = done.choices[0]
    assert (done.object, choice.message.role, choice.finish_reason) == ("chat.completion", "assistant", "length")
    again = [*HELLO, choice.message, {"role": "user", "content": "why"}]  # answers may be sent back as they came
    more = client.chat.completions.create(model="fake", messages=again, max_tokens=5)  # type: ignore
    assert more.usage is not None and more.usage.prompt_tokens > done.usage.total_tokens  # type: ignore[union-attr]
    details = more.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None and details.cached_tokens > 0


def test_parts_and_developer_messages_reach_the_template(server: Served) -> None:
    said = [{"role": "developer", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "mat"}]}]
    plain = [{"role": "system", "content": "the\nmat"}]
    first, second = (server.post("/tokenize", messages=messages).json() for messages in (said, plain))
    assert first == second and first["count"] == len(first["tokens"])


@pytest.mark.parametrize(
    ("prompt", "num_prompts", "num_tokens"),
    [("the cat", 1, 3), (["the cat", "a mat"], 2, 6), ([3, 4, 5], 1, 3), ([[3, 4], [5]], 2, 3)],
)
def test_all_kinds_of_prompts(server: Served, prompt: Any, num_prompts: int, num_tokens: int) -> None:
    done = server.complete(prompt, n=2, max_tokens=3, seed=9)
    assert [choice["index"] for choice in done["choices"]] == list(range(2 * num_prompts))
    assert done["usage"]["prompt_tokens"] == num_tokens, "a prompt counts once"
    assert done["usage"]["completion_tokens"] == 6 * num_prompts


def test_choices_have_the_seeds_that_prompts_of_one_call_have(server: Served) -> None:
    server.engine.added.clear()
    together = server.complete(["the cat", "a mat"], n=2, seed=11, max_tokens=4)
    asked = [(request.index, request.params.seed) for request in server.engine.added]
    assert asked == [(0, 11), (1, 11), (2, 11), (3, 11)]
    prompts = [server.model.tokenizer.decode(request.prompt_ids) for request in server.engine.added]  # type: ignore
    assert prompts == ["the cat", "the cat", "a mat", "a mat"]
    assert server.complete("the cat", seed=11, max_tokens=4)["choices"][0]["text"] == together["choices"][0]["text"]
    assert server.complete()["choices"][0]["text"] != server.complete()["choices"][0]["text"], "without a seed"


def test_every_parameter_reaches_the_engine(server: Served) -> None:
    server.engine.added.clear()
    given: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1}
    given |= {"presence_penalty": 0.2, "frequency_penalty": -0.3, "logit_bias": {"5": -100}, "seed": 4, "logprobs": 2}
    given |= {"ignore_eos": True, "stop": ["zzz"], "stop_token_ids": [6], "max_tokens": 9, "speculate": False}
    server.complete(**given)
    params = server.engine.added[0].params
    expected = {**given, "logit_bias": {5: -100}, "stop": ("zzz",), "stop_token_ids": (6,), "top_logprobs": 2}
    expected |= {"max_new_tokens": expected.pop("max_tokens"), "logprobs": True}
    assert {name: getattr(params, name) for name in expected} == expected


def test_logprobs_of_completions(server: Served) -> None:
    choice = server.complete(logprobs=2, max_tokens=4, seed=1)["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert [choice["text"][at:].startswith(t) for at, t in zip(found["text_offset"], found["tokens"], strict=True)]
    assert found["token_logprobs"] == [0, -0.5, -1, -1.5]
    assert [list(top.values()) for top in found["top_logprobs"]] == [[-0.25, -9999.0]] * 4, "JSON has no infinity"
    assert server.complete(logprobs=0, max_tokens=4)["choices"][0]["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_echo_with_logprobs_scores_the_prompt(server: Served, max_tokens: int) -> None:
    prompts = ["the cat é", "a"]
    ids = [server.model.tokenizer.encode(prompt) for prompt in prompts]  # type: ignore[union-attr]
    for given in (prompts, ids):
        done = server.complete(given, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)
        assert done["usage"]["completion_tokens"] == 2 * max_tokens
        for prompt, num, choice in zip(prompts, map(len, ids), done["choices"], strict=True):
            found = choice["logprobs"]
            assert choice["text"].startswith(prompt) and choice["finish_reason"] == "length"
            assert {len(values) for values in found.values()} == {num + max_tokens}
            values = [None, *(-0.1 * n for n in range(1, num)), *(-0.5 * n for n in range(max_tokens))]
            assert found["token_logprobs"] == pytest.approx(values)
            assert found["top_logprobs"][0] is None and list(found["top_logprobs"][num - 1 : num]) != [{}]
            assert found["text_offset"][0] == 0 and found["text_offset"][num:][:1] == [len(prompt)][:max_tokens]
    [choice] = server.complete("the cat", echo=True, logprobs=0, max_tokens=0)["choices"]
    assert choice["logprobs"]["top_logprobs"] is None


def test_logprobs_of_chats(server: Served) -> None:
    server.engine.scripts["héllo"] = "né 🙂"
    asked: Any = {"messages": [{"role": "user", "content": "héllo"}], "logprobs": True, "top_logprobs": 3}
    done = server.openai().chat.completions.create(model="fake", temperature=0, **asked)
    choice = done.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("né 🙂", "stop")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert len(content) == done.usage.completion_tokens  # type: ignore[union-attr]
    assert b"".join(bytes(token.bytes or []) for token in content[:-1]) == "né 🙂".encode(), "halves of characters, too"
    assert all(len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token for token in content)
    assert content[-1].token == "<|im_end|>"


def test_token_details_of_a_whole_answer(server: Served) -> None:
    done = server.complete(token_details=True, max_tokens=9, seed=3)
    choice, rounds = done["choices"][0], done["speculative"]
    assert "".join(token["text"] for token in choice["tokens"]) == choice["text"]
    made = [token["source"] for token in choice["tokens"]]
    assert len(made) == 9 and rounds["accepted"] == made.count("accepted") == sum(rounds["accepted_at"])
    assert rounds["drafted"] == 3 * rounds["rounds"] and rounds["tau"] == pytest.approx(8 / rounds["rounds"])
    plain = server.complete(token_details=True, speculate=False, max_tokens=9, seed=3)
    assert plain["choices"][0]["text"] == choice["text"]
    assert {token["source"] for token in plain["choices"][0]["tokens"]} == {"target"}
    assert plain["speculative"]["drafted"] == 0 and plain["speculative"]["tau"] == 1
    assert rounds["tau_drafted"] == rounds["tau"] and plain["speculative"]["tau_drafted"] is None
    assert rounds["acceptance_by_position"] == [count / rounds["rounds"] for count in rounds["accepted_at"]]


def test_long_texts_hold_up_nobody(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, text = make_tokenizer(), "the cat sat on a mat " * 300
    whole = tokenizer.backend.encode(text).ids
    tokenizer.backend = Mock(encode_batch_fast=tokenizer.backend.encode_batch_fast)  # `encode` keeps the GIL
    assert tokenizer.encode(text) == whole
    made: list[str] = []

    def recorded(content: Any) -> JSONResponse:
        made.append(threading.current_thread().name)
        return JSONResponse(content)

    monkeypatch.setattr("serve.routes.admin.JSONResponse", recorded)
    ids = server.post("/tokenize", prompt="the cat").json()["tokens"]
    server.post("/detokenize", tokens=ids)
    assert len(made) == 2 and all("worker" in name for name in made), "not on the event loop's thread"


def test_predict_gives_the_prompt_and_more(server: Served) -> None:
    answer = server.post("/predict", prompt="the cat").json()
    assert answer.startswith("the cat") and len(answer.split()) == 42


def test_models_and_version(server: Served) -> None:
    card = server.http.get("/v1/models").json()["data"][0]
    assert (card["id"], card["root"], card["max_model_len"]) == ("fake", "/models/fake", 256)
    assert server.openai().models.retrieve("fake").id == "fake"
    assert server.http.get("/v1/models/other").status_code == 404
    assert server.http.get("/version").json()["version"]


def test_the_page(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = server.http.get("/")
    own = re.search('http-equiv="Content-Security-Policy" content="([^"]*)"', found.text)
    assert own and found.headers["content-security-policy"] == f"{own[1]}; frame-ancestors 'none'"
    assert found.headers["x-content-type-options"] == "nosniff"
    for path in ("/", "/health"):
        head = server.http.head(path)
        assert head.status_code == 200 and not head.content
    monkeypatch.setattr("serve.routes.admin.PAGE", tmp_path)
    missing = server.http.get("/")
    assert missing.status_code == 404 and missing.text.count("\n") == 1
    (tmp_path / "index.html").write_text("<p>hello")
    (tmp_path / "chat.js").write_text("true")
    with served(settings={"api_keys": ("secret",)}) as other:
        assert other.http.get("/").text == "<p>hello", "nobody has a key before they see the page"
        script = other.http.get("/page/chat.js")
        assert script.text == "true" and "javascript" in script.headers["content-type"]
        for path in ("/page/none.js", "/page/%2e%2e/chat.js"):
            error_of(other.http.get(path), 404)


def test_the_model_has_further_names() -> None:
    with served(settings={"aliases": ("gpt-4o", "team/small", "gpt-4o")}) as server:
        assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["fake", "gpt-4o", "team/small"]
        assert server.http.get("/v1/models/team/small").json()["id"] == "team/small"
        for path, body in bodies().items():
            for name in ("fake", "gpt-4o", "team/small"):
                assert server.post(path, **body | {"model": name}).json()["model"] == name, path
                chunks = server.post(path, **body | {"model": name, "stream": True}).text
                assert set(re.findall(r'"model": ?"([^"]+)"', chunks)) == {name}, path
            refused = server.post(path, **body | {"model": "other"})
            assert refused.status_code == 404 and "this server has 'fake' or 'gpt-4o' or 'team/small'" in refused.text
        assert server.complete("the cat", max_tokens=2)["model"] == "fake", "the first name without one"


def test_a_request_has_an_id(server: Served) -> None:
    given = server.http.post(TEXT, json={"prompt": "the"}, headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1" and given.json()["id"] == "cmpl-mine-1"
    odd = server.http.post(TEXT, json={"prompt": "the"}, headers={"x-request-id": "a b\tc" * 100})
    assert re.fullmatch("[0-9a-f]{32}", odd.headers["x-request-id"])


def test_keys() -> None:
    import openai

    with served(settings={"api_keys": ("secret", "other")}) as server:
        for given in (None, b"Bearer wrong", b"secret", b"Bearer \xff", b"Basic secret"):
            refused = server.http.get("/v1/models", headers={"authorization": given} if given else {})
            assert error_of(refused, 401)["code"] == "invalid_api_key" and "www-authenticate" in refused.headers
        with pytest.raises(openai.AuthenticationError):
            server.openai("wrong").models.list()
        for key in ("secret", "other"):
            assert server.openai(key).models.list().data[0].id == "fake"
        for path in ("/health", "/version", "/metrics"):
            assert server.http.get(path).status_code == 200
        for path in (TEXT, CHAT, "/tokenize", "/detokenize", "/predict"):
            error_of(server.post(path), 401)


def test_other_origins_may_ask_only_where_they_are_named(server: Served) -> None:
    asking = {"origin": "https://example.org", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in server.http.options(TEXT, headers=asking).headers
    with served(settings={"cors_origins": ("https://example.org",), "api_keys": ("secret",)}) as other:
        preflight = other.http.options(TEXT, headers=asking)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://example.org"
        refused = other.http.get("/v1/models", headers={"origin": "https://example.org"})
        assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
        asking["origin"] = "https://example.com"
        assert "access-control-allow-origin" not in other.http.options(TEXT, headers=asking).headers


def test_a_line_for_each_request(capfd: pytest.CaptureFixture[str]) -> None:
    for as_json in (True, False):
        with served(settings={"json_log": as_json}) as server:
            capfd.readouterr()
            server.http.post(TEXT, json={"prompt": "the cat", "seed": 5}, headers={"x-request-id": "mine"})
            server.post(TEXT, prompt="the cat", n=0)
            server.http.get("/health")
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 2 and "the cat" not in lines[0]
        if as_json:
            good, bad = map(json.loads, lines)
            assert (good["id"], good["status"], good["completion_tokens"], good["seed"]) == ("mine", 200, 16, 5)
            assert good["finish"] == "length" and bad["status"] == 400
        else:
            assert all(f" {field} " in f"{lines[0]} " for field in ("id=mine", "status=200", "seed=5", "finish=length"))
    with served(settings={"json_log": True, "log_prompts": True}) as server:
        capfd.readouterr()
        drawn = server.complete("the cat")
    line = json.loads(capfd.readouterr().err)
    assert line["prompt"] == ["the cat"]
    with served() as server:
        assert server.complete("the cat", seed=line["seed"])["choices"] == drawn["choices"], "the line tells the seed"
