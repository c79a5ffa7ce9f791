"""Streams, clients that hang up, overload, failures, metrics. Over real HTTP, with a fake engine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from tests.helpers.fake_engine import FAILING, fake_model
from tests.helpers.served_model import Served, served

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream that has ended as it should."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "[DONE]" and "[DONE]" not in lines[:-1]
    return [json.loads(line) for line in lines[:-1]]


def stream(server: Served, path: str = TEXT, **body: Any) -> list[dict[str, Any]]:
    response = server.post(path, stream=True, **body)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


@pytest.mark.parametrize("speculate", [True, False])
def test_a_stream_is_the_whole_answer(server: Served, speculate: bool) -> None:
    asked = {"prompt": ["the cat", "a mat"], "n": 2, "seed": 7, "max_tokens": 20, "logprobs": 1, "speculate": speculate}
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
        assert (len(own) == 20) == (not speculate), "an event for each round"


def test_a_stream_begins_with_the_scores_of_the_prompt(server: Served) -> None:
    asked = {"prompt": ["the cat", "a mat"], "seed": 7, "max_tokens": 9, "logprobs": 1, "echo": True}
    whole, parts = server.complete(**asked), stream(server, **asked)
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for part in own for value in part["logprobs"][name]] == values


def test_a_stream_without_usage_ends_with_choices(server: Served) -> None:
    parts = stream(server, prompt="the", max_tokens=4)
    assert all(part["choices"] and "usage" not in part for part in parts)


def test_the_openai_client_reads_streams(server: Served) -> None:
    chunks = list(
        server.openai().chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "the cat"}],
            max_tokens=9,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"token_details": True},
        )
    )
    first, last = chunks[0], chunks[-1]
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content, "no empty chunk comes first"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert last.usage is not None and last.usage.completion_tokens == 9
    tokens = [token for chunk in chunks[:-1] for token in chunk.choices[0].tokens]  # type: ignore[attr-defined]
    assert len(tokens) == 9 and {"id", "text", "source", "drafter"} == set(tokens[0])
    assert "".join(token["text"] for token in tokens) == "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert last.speculative["accepted"] == sum(token["drafter"] == "suffix" for token in tokens)  # type: ignore


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


def test_half_a_character_at_the_end_comes_once(server: Served) -> None:
    server.engine.scripts["smile"] = "né 🙂"
    whole = server.complete("smile", max_tokens=5)
    parts = stream(server, prompt="smile", max_tokens=5)
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]
    assert parts[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("speculate", [True, False])
def test_stop_strings_are_never_shown(server: Served, speculate: bool) -> None:
    server.engine.scripts["story"] = " cat sat mat sat sky"
    asked = {"prompt": "story", "stop": ["mat sat"], "speculate": speculate, "logprobs": 0}
    parts = stream(server, **asked, stream_options={"include_usage": True})
    choices = [part["choices"][0] for part in parts[:-1]]
    assert "".join(choice["text"] for choice in choices) == " cat sat "
    assert not any("mat" in choice["text"] for choice in choices)
    assert choices[-1]["finish_reason"] == "stop"
    num_tokens = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
    assert num_tokens == parts[-1]["usage"]["completion_tokens"], "ids, logprobs and usage end at the same token"


def test_a_stop_that_is_not_completed_is_shown(server: Served) -> None:
    server.engine.scripts["story"] = " cat sat mat"
    num_tokens = len(server.model.tokenizer.encode(" cat sat mat"))  # type: ignore[union-attr]
    parts = stream(server, prompt="story", stop=["mat sat"], max_tokens=num_tokens)
    assert "".join(part["choices"][0]["text"] for part in parts) == " cat sat mat"
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    ended = server.complete("story", stop=["mat"], max_tokens=num_tokens)["choices"][0]
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


@contextmanager
def raw_request(server: Served, body: dict[str, Any]) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + data)
        yield sock


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_client_that_hangs_up_frees_its_rows(streamed: bool, reset: bool) -> None:
    with served(settings={"max_batch": 1}) as server:
        server.engine.held = lambda: True  # so that no answer can end by itself
        with raw_request(server, {"prompt": "the cat", "n": 2, "max_tokens": 200, "stream": streamed}) as sock:
            server.wait(lambda: (server.engine.num_running, server.engine.num_waiting) == (1, 1))
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        server.wait(lambda: (server.engine.num_running, server.engine.num_waiting) == (0, 0))
        server.engine.held = lambda: False
        server.wait(lambda: "sharesd:http_requests_client_disconnected_total" in str(server.metrics()))
        name = 'sharesd:http_requests_client_disconnected_total{engine="0",model_name="fake"}'
        server.wait(lambda: server.metrics()[name] == 1)
        server.complete(n=1)


def test_clients_that_are_killed_free_their_rows() -> None:
    body = json.dumps({"prompt": "the cat", "max_tokens": 200, "stream": True})
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    client = (
        "import socket, sys\n"
        "sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "sock.sendall(sys.argv[3].encode())\n"
        "while sock.recv(4096): pass\n"
    )
    with served(settings={"max_batch": 2}) as server:
        server.engine.held = lambda: True  # so that no answer can end by itself
        address = server.url.removeprefix("http://").split(":")
        command = [sys.executable, "-S", "-c", client, *address, head + body]
        clients = [subprocess.Popen(command) for _ in range(3)]
        server.wait(lambda: (server.engine.num_running, server.engine.num_waiting) == (2, 1))
        for process in clients:
            process.kill()
        for process in clients:
            process.wait()
        server.wait(lambda: (server.engine.num_running, server.engine.num_waiting) == (0, 0))
        server.engine.held = lambda: False
        server.complete()


def test_the_openai_client_may_close_a_stream() -> None:
    with served(delay=0.02) as server:
        answer = server.openai().completions.create(model="fake", prompt="the", max_tokens=200, stream=True)
        next(iter(answer))
        answer.close()
        server.wait(lambda: server.engine.num_running == 0)


def test_a_full_queue_refuses_before_anything_is_encoded() -> None:
    with served(settings={"max_batch": 1, "max_queue": 2}) as server:
        server.engine.held = lambda: True
        with raw_request(server, {"prompt": "the cat", "max_tokens": 200, "n": 2}):
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


def test_overload_is_answered() -> None:
    with served(settings={"max_batch": 2, "max_queue": 4}) as server:
        refused = threading.Event()
        server.engine.held = lambda: not refused.is_set()

        def ask(number: int) -> tuple[int, str]:
            response = server.post(TEXT, prompt="the cat", seed=number % 5, max_tokens=20, stream=number % 2 == 0)
            if response.status_code != 200:
                refused.set()
                return response.status_code, ""
            found = events(response.text) if number % 2 == 0 else [response.json()]
            return 200, "".join(part["choices"][0]["text"] for part in found)

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(80)))
        assert {status for status, _ in answers} == {200, 429}
        for seed in range(5):
            alone = ask(seed)[1]
            assert {text for n, (status, text) in enumerate(answers) if status == 200 and n % 5 == seed} <= {alone}
        assert (server.engine.num_running, server.engine.num_waiting) == (0, 0)


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
    def speculation() -> dict[str, float]:
        """As `vllm bench serve` reads them."""
        found: dict[str, float] = {}
        for line in server.http.get("/metrics").text.split("\n"):
            line = line.strip()
            if line.startswith("#") or not line.startswith("vllm:spec_decode"):
                continue
            parts = line.split()
            name = parts[0].split("{")[0]
            if not name.endswith("_total"):
                continue
            if "position=" in line:
                name += line.split('position="')[1].split('"')[0]
            found[name] = found.get(name, 0) + float(parts[-1])
        return found

    before, others = speculation(), server.metrics()
    done = server.complete(token_details=True, max_tokens=40)["speculative"]
    gained = {name: value - before.get(name, 0) for name, value in speculation().items()}
    prefix = "vllm:spec_decode_num"
    assert gained[f"{prefix}_drafts_total"] == done["rounds"]
    assert gained[f"{prefix}_draft_tokens_total"] == done["drafted"]
    assert gained[f"{prefix}_accepted_tokens_total"] == done["accepted"]
    at = [gained[f"{prefix}_accepted_tokens_per_pos_total{i}"] for i in range(len(done["accepted_at"]))]
    assert at == done["accepted_at"]
    after, own = server.metrics(), '{engine="0",model_name="fake"}'
    delta = {name: value - others.get(name, 0) for name, value in after.items()}
    assert delta[f"sharesd:generation_tokens_total{own}"] == 40
    assert delta[f"sharesd:prompt_tokens_total{own}"] == delta[f"sharesd:prefix_cache_queries_total{own}"] == 3
    assert delta[f"sharesd:spec_decode_num_drafts_total{own}"] == done["rounds"]
    assert delta['sharesd:request_success_total{engine="0",finished_reason="length",model_name="fake"}'] == 1
    for name, count in {
        "time_to_first_token": 1,
        "e2e_request_latency": 1,
        "inter_token_latency": done["rounds"],
    }.items():
        assert delta[f"sharesd:{name}_seconds_count{own}"] == count
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"sharesd:{name}{own}"] == 0


def test_times_of_a_choice_add_up() -> None:
    with served(settings={"max_batch": 1}, delay=0.02, piece=2) as server:
        server.complete([5] * 7, n=2, max_tokens=5, speculate=False)
        metrics, own = server.metrics(), '{engine="0",model_name="fake"}'
        assert metrics["process_resident_memory_bytes"] > 2**20
    parts = {
        name: metrics[f"sharesd:{name}_seconds_sum{own}"]
        for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency")
    }
    assert metrics[f"sharesd:request_queue_time_seconds_count{own}"] == 2
    queued, prefill, decode, whole = parts.values()
    assert queued + prefill + decode == pytest.approx(whole)
    assert queued > 0.1, "the second choice waits for the eight steps of the first, which sleep"
    assert prefill > 0 and decode > 0
    assert metrics[f"sharesd:time_to_first_token_seconds_sum{own}"] == pytest.approx(queued + prefill)
