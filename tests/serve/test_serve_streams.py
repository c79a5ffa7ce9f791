"""Streams, clients that hang up, overload, failures, metrics. Over real HTTP, with a fake engine."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest

from tests.helpers.fake_engine import FAILING, fake_model
from tests.helpers.serve_requests import HELLO, TEXT
from tests.helpers.served_model import Served, served
from tests.serve.common import sent, stream


@pytest.mark.parametrize("more", [{}, {"speculate": False}, {"echo": True}], ids=str)
def test_a_stream_is_the_whole_answer(server: Served, more: dict[str, Any]) -> None:
    asked = {"prompt": ["the cat", "a mat"], "n": 2, "seed": 7, "max_tokens": 20, "logprobs": 1, **more}
    whole = server.complete(**asked)
    parts = stream(server, **asked, stream_options={"include_usage": True, "include_obfuscation": False})
    assert all(len(part["choices"]) == 1 and part["usage"] is None for part in parts[:-1])
    assert parts[-1]["choices"] == [] and "speculative" not in parts[-1]
    assert parts[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 80
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + ["length"]
        for name, values in choice["logprobs"].items():
            assert [value for part in own for value in part["logprobs"][name]] == values
        assert (len(own) == 20) == ("speculate" in more), "an event for each round"
    assert all(part["choices"] and "usage" not in part for part in stream(server, **asked)), "without stream_options"


def test_the_openai_client_reads_streams(server: Served) -> None:
    asked: Any = {"model": "fake", "messages": HELLO, "max_tokens": 9, "seed": 1, "stream": True}
    asked |= {"stream_options": {"include_usage": True}, "extra_body": {"token_details": True}}
    chunks: list[Any] = list(server.openai().chat.completions.create(**asked))
    first, last = chunks[0], chunks[-1]
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content, "no empty chunk comes first"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert last.usage is not None and last.usage.completion_tokens == 9
    tokens = [token for chunk in chunks[:-1] for token in chunk.choices[0].tokens]
    assert len(tokens) == 9 and {"id", "text", "source", "drafter"} == set(tokens[0])
    assert "".join(token["text"] for token in tokens) == "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert last.speculative["accepted"] == sum(token["drafter"] == "suffix" for token in tokens)


def test_characters_are_never_cut(server: Served) -> None:
    server.engine.scripts["smile"] = text = "né 🙂🙂 ü"
    for speculate in (True, False):
        parts = stream(server, prompt="smile", max_tokens=99, speculate=speculate, token_details=True)
        choices = [part["choices"][0] for part in parts[:-1]]
        assert "".join(choice["text"] for choice in choices) == text
        assert not any("\ufffd" in choice["text"] for choice in choices)
        tokens = [token for choice in choices for token in choice["tokens"]]
        assert "".join(token["text"] for token in tokens) == text
        assert "🙂" in {token["text"] for token in tokens}, "with the token that completes it"
        assert choices[-1]["finish_reason"] == "stop"
    whole, parts = server.complete("smile", max_tokens=5), stream(server, prompt="smile", max_tokens=5)
    said = "".join(part["choices"][0]["text"] for part in parts)
    assert said == whole["choices"][0]["text"] and "\ufffd" in said, "half a character at the end comes once"
    assert parts[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("speculate", [True, False])
def test_stop_strings_are_never_shown(server: Served, speculate: bool) -> None:
    server.engine.scripts["story"] = " cat sat mat sat sky"
    asked: dict[str, Any] = {"prompt": "story", "speculate": speculate}
    options = {"stop": ["mat sat"], "logprobs": 0, "stream_options": {"include_usage": True}}
    *parts, last = stream(server, **asked, **options)
    choices = [part["choices"][0] for part in parts]
    assert "".join(choice["text"] for choice in choices) == " cat sat "
    assert not any("mat" in choice["text"] for choice in choices) and choices[-1]["finish_reason"] == "stop"
    num_tokens = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
    assert num_tokens == last["usage"]["completion_tokens"], "ids, logprobs and usage end at the same token"
    server.engine.scripts["story"] = " cat sat mat"
    asked["max_tokens"] = len(server.model.tokenizer.encode(" cat sat mat"))  # type: ignore[union-attr]
    parts = stream(server, **asked, stop=["mat sat"])
    assert "".join(part["choices"][0]["text"] for part in parts) == " cat sat mat", "it is not completed"
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    ended = server.complete(**asked, stop=["mat"])["choices"][0]
    assert (ended["text"], ended["finish_reason"]) == (" cat sat ", "stop"), "a stop within the budget is a stop"


def test_tokens_come_at_once_and_comments_before_them() -> None:
    """The engine goes on when the client has what was sent before."""
    with served(settings={"keep_alive": 0.05}) as server:
        rounds = threading.Semaphore(0)
        server.engine.held = lambda: not rounds.acquire(blocking=False)
        body = {"prompt": [5] * 10, "stream": True, "max_tokens": 6, "speculate": False}
        with server.http.stream("POST", TEXT, json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            assert next(lines) == next(lines) == ": keep-alive", "while the prompt is read"
            for _ in range(6):
                rounds.release()
                assert next(line for line in lines if line != ": keep-alive").startswith("data: {")
            rounds.release()
            assert [line for line in lines if line.startswith("data: {")] == [], "flushed round by round"


def test_a_client_that_hangs_up_frees_its_rows() -> None:
    gone = 'sharesd:http_requests_client_disconnected_total{engine="0",model_name="fake"}'
    with served(settings={"max_batch": 1}) as server:
        engine = server.engine
        engine.held = lambda: True  # so that no answer can end by itself
        for count, (streamed, reset) in enumerate(product([True, False], repeat=2), 1):
            body = {"prompt": "the cat", "n": 2, "max_tokens": 200, "stream": streamed}
            with sent(server, json.dumps(body).encode()) as sock:
                server.wait(lambda: (engine.num_running, engine.num_waiting) == (1, 1))
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            server.wait(lambda: (engine.num_running, engine.num_waiting) == (0, 0))
            server.wait(lambda count=count: server.metrics().get(gone) == count)
        engine.held = lambda: False
        server.complete(n=1)


def test_a_full_queue_refuses_before_anything_is_encoded() -> None:
    import openai

    with served(settings={"max_batch": 1, "max_queue": 2}) as server:
        server.engine.held = lambda: True
        with sent(server, b'{"prompt": "the cat", "max_tokens": 200, "n": 2}'):
            server.wait(lambda: server.engine.num_waiting == 1)
            tokenizer = server.model.tokenizer  # type: ignore[union-attr]
            encode, tokenizer.encode = tokenizer.encode, None  # type: ignore[method-assign, assignment]
            refused = server.post(TEXT, prompt="the", n=2)
            tokenizer.encode = encode  # type: ignore[method-assign]
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["type"] == "rate_limit_error"
            with pytest.raises(openai.RateLimitError):
                server.openai().completions.create(model="fake", prompt="the", n=2)
            assert server.post(TEXT, prompt="the", n=4).status_code == 400, "that many would never fit"
            server.engine.held = lambda: False
            assert server.post(TEXT, prompt="the", n=1, max_tokens=1).status_code == 200, "one place was free"
        server.wait(lambda: server.engine.num_running == 0)
        assert server.post(TEXT, prompt="the", n=3).status_code == 200, "all places are free again"
        for wrong in ({"prompt": [10**6]}, {"prompt": [5] * 300}, {"prompt": ["the", "why blue"]}) * 3:
            assert server.post(TEXT, **wrong).status_code == 400
        assert server.post(TEXT, prompt="the", n=3).status_code == 200, "wrong requests keep no places"


def test_a_failure_is_told_to_all_and_ends_the_server() -> None:
    with served() as server, ThreadPoolExecutor(2) as pool:
        server.engine.held = lambda: len(server.engine.added) < 3
        body = {"prompt": "the cat", "max_tokens": 200}
        whole = pool.submit(server.post, TEXT, **body)
        streamed = pool.submit(server.post, TEXT, **body, stream=True)
        server.wait(lambda: server.engine.num_running == 2)
        failing = server.post(TEXT, prompt=FAILING)
        assert whole.result().status_code == failing.status_code == 500
        assert whole.result().json()["error"]["type"] == "server_error"
        *_, error, done = streamed.result().text.strip().split("\n\n")
        assert done == "data: [DONE]" and "error" in json.loads(error.removeprefix("data: "))
        server.wait(lambda: server.status is not None)
        assert server.status == 1


def test_nothing_is_served_before_the_model_is_loaded() -> None:
    loaded = threading.Event()

    def load() -> Any:
        loaded.wait(300)
        return fake_model()

    with served(load) as server:
        health = server.http.get("/health")
        assert health.status_code == 503 and "loaded" in health.json()["error"]["message"]
        refused = server.post(TEXT, prompt="the")
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert server.http.get("/metrics").status_code == 200
        loaded.set()
        server.wait(lambda: server.http.get("/health").status_code == 200)
        server.complete()


def test_a_step_that_hangs_shows_in_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.async_engine.MAX_STEP_SECONDS", 0.1)
    goes_on = threading.Event()
    with served() as server, ThreadPoolExecutor(1) as pool:
        server.engine.held = lambda: not goes_on.wait(300)
        answer = pool.submit(server.complete, max_tokens=1)
        server.wait(lambda: server.http.get("/health").status_code == 503)
        goes_on.set()
        assert answer.result()["choices"]
        server.wait(lambda: server.http.get("/health").status_code == 200)


def test_the_first_round_has_its_own_drafts_also_where_it_comes_with_the_first_token() -> None:
    with served(eager=True) as server:
        done = server.complete("the cat", seed=1, max_tokens=40, token_details=True)["speculative"]
        assert done["drafted"] == 3 * done["rounds"]
        metrics, own = server.metrics(), '{engine="0",model_name="fake"}'
        assert metrics[f"vllm:spec_decode_num_drafts_total{own}"] == done["rounds"]
        assert metrics[f"vllm:spec_decode_num_draft_tokens_total{own}"] == done["drafted"]
        assert metrics[f"vllm:spec_decode_num_accepted_tokens_total{own}"] == done["accepted"]


def test_metrics_have_the_names_that_vllms_client_reads(server: Served) -> None:
    before, own = server.metrics(), '{engine="0",model_name="fake"}'
    done = server.complete(token_details=True, max_tokens=40)["speculative"]
    after = server.metrics()
    gained = {name: value - before.get(name, 0) for name, value in after.items()}
    for prefix in ("vllm", "sharesd"):
        for name, count in (("drafts", "rounds"), ("draft_tokens", "drafted"), ("accepted_tokens", "accepted")):
            assert gained[f"{prefix}:spec_decode_num_{name}_total{own}"] == done[count]
        at = f'{prefix}:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="fake",position="%d"}}'
        assert [gained[at % place] for place in range(len(done["accepted_at"]))] == done["accepted_at"]
    counts = {"generation_tokens_total": 40, "prompt_tokens_total": 3, "prefix_cache_queries_total": 3}
    times = {"time_to_first_token": 1, "e2e_request_latency": 1, "inter_token_latency": done["rounds"]}
    counts |= {f"{name}_seconds_count": count for name, count in times.items()}
    assert {name: gained[f"sharesd:{name}{own}"] for name in counts} == counts
    assert gained['sharesd:request_success_total{engine="0",finished_reason="length",model_name="fake"}'] == 1
    assert after['sharesd:kernels_info{engine="0",kernels="cpu",model_name="fake"}'] == 1
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "recurrent_state_bytes")
    for name in names:
        assert after[f"sharesd:{name}{own}"] == 0


def test_times_of_a_choice_add_up() -> None:
    with served(settings={"max_batch": 1}, delay=0.02, piece=2) as server:
        server.complete([5] * 7, n=2, max_tokens=5, speculate=False)
        metrics, own = server.metrics(), '{engine="0",model_name="fake"}'
        assert metrics["process_resident_memory_bytes"] > 2**20
    names = ("request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency")
    queued, prefill, decode, whole = (metrics[f"sharesd:{name}_seconds_sum{own}"] for name in names)
    assert metrics[f"sharesd:request_queue_time_seconds_count{own}"] == 2
    assert queued + prefill + decode == pytest.approx(whole)
    assert queued > 0.1, "the second choice waits for the eight steps of the first, which sleep"
    assert prefill > 0 and decode > 0
    assert metrics[f"sharesd:time_to_first_token_seconds_sum{own}"] == pytest.approx(queued + prefill)
