"""What requests leave behind: nothing that grows with their number, neither objects nor memory."""

from __future__ import annotations

import contextlib
import gc
import random
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sharesd.config import EngineConfig
from tests.helpers.serve_requests import CHAT, TEXT
from tests.serve.common import make_model, real
from tests.serve.test_responses_api import TEMPLATE

STOPS = (2000, 6000, 10_000)
"""Numbers of requests after which memory is read."""
MIB = 2**20
Body = dict[str, Any]


def function(number: int) -> Body:
    """Return a function whose schema no other request has."""
    schema = {"type": "object", "properties": {f"city{number}": {"enum": ["the mat", "a cat"]}}}
    return {"name": f"get_{number}", "description": "d", "parameters": schema | {"additionalProperties": False}}


def send(client: httpx.Client, how: str, path: str, body: Body) -> None:
    match how:
        case "hang up":
            with client.stream("POST", path, json={**body, "stream": True}) as response:
                next(response.iter_lines())
        case "hang up at once":
            with contextlib.suppress(httpx.TimeoutException):
                client.post(path, json=body, timeout=0.005)
        case "refused":
            assert client.post(path, json=body).status_code in (400, 404)
        case _:
            response = client.post(path, json={**body, "stream": True} if how == "streamed" else body)
            assert response.status_code == 200 and '{"error"' not in response.text, response.text


def request(number: int) -> tuple[str, str, Body]:
    """Return one of many kinds of requests, with texts of its own."""
    dice = random.Random(number)
    said = " ".join(dice.choice(("the", "cat", "mat", "sky", "red")) for _ in range(dice.randint(2, 30)))
    talk = {"messages": [{"role": "user", "content": f"{said} {number}"}], "temperature": dice.choice((0, 0.8))}
    chat: Body = {**talk, "max_tokens": dice.randint(2, 8), "seed": number}
    text: Body = {"prompt": f"{said} {number}", "max_tokens": dice.randint(2, 8), "seed": number}
    tools = {"tools": [{"type": "function", "function": function(number)}]}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": function(number)["parameters"]}}
    kinds = (
        ("whole", TEXT, {**text, "logprobs": 3, "n": 2, "echo": True}),
        ("streamed", TEXT, {**text, "stream_options": {"include_usage": True}, "token_details": True}),
        ("whole", CHAT, {**chat, "stop": [f"sat{number}", "mat"], "logit_bias": {str(5 + number % 300): -5}}),
        ("streamed", CHAT, chat),
        ("streamed", CHAT, {**chat, **tools, "max_tokens": 12}),
        ("whole", CHAT, {**chat, **tools, "tool_choice": "required", "max_tokens": 12}),
        ("whole", CHAT, {**chat, "response_format": schema, "max_tokens": 12}),
        ("hang up", CHAT, {**chat, "max_tokens": 100}),
        ("hang up at once", TEXT, {**text, "max_tokens": 100}),
        ("refused", CHAT, {**chat, f"unknown{number}": 1}),
        ("refused", TEXT, {**text, "model": f"other{number}"}),
        ("refused", CHAT, {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": f"x{number}"}}}),
        ("refused", f"/no/such/path/{number}", chat),
        ("streamed", "/v1/responses", {"input": f"{said} {number}", "max_output_tokens": 4}),
        ("whole", "/v1/messages", {**talk, "model": "t", "max_tokens": 4}),
        ("whole", "/tokenize", {"prompt": f"{said} {number}"}),
    )
    return kinds[number % len(kinds)]


def ask_all(client: httpx.Client, numbers: range) -> None:
    """Send these requests, four at once, and wait until none runs or waits."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: send(client, *request(number)), numbers))
    busy = re.compile(r"^sharesd:num_requests_(running|waiting)\{.*\} [^0]", re.M)
    while busy.search(client.get("/metrics").text):
        time.sleep(0.05)


OURS = {
    *("RequestState", "ServerCall", "Choice", "Request", "StopChecker", "Stats", "TextStream", "Task", "_Running"),
    *("CompletionFormat", "ChatFormat", "TokenTexts"),
}
"""Classes of which each request has an object or more."""


def ours() -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing).__name__ in OURS)


@pytest.mark.slow
def test_no_object_of_a_request_stays(tmp_path: Path) -> None:
    config = EngineConfig(target=str(make_model(tmp_path, TEMPLATE)), mode="hybrid", max_batch=4)
    with real(config, model_name="t") as server:
        ask_all(server.http, range(48))
        before, lines = ours(), len(server.metrics())
        ask_all(server.http, range(48, 240))  # twelve of each kind
        more = {name: count for name, count in (ours() - before).items() if count > 8}
        assert not more, "8 at most are of what is asked last"
        assert len(server.metrics()) <= lines + 20, "no label has a value of each request"


@pytest.mark.long
def test_memory_is_flat(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny", TEMPLATE, layers=1)
    flags = ["--port", "0", "--target", str(folder), "--mode", "suffix", "--max-batch", "4", "--served-model-name", "t"]
    command = [sys.executable, "-m", "serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            found = memory(url, psutil.Process(process.pid))
        finally:
            process.terminate()
            assert process.wait(60) == 0
    first, second, third = (size / MIB for size in found)
    print(f"RSS {first:.1f}, {second:.1f}, {third:.1f} MiB after {', '.join(map(str, STOPS))} requests")
    assert third - second < 8 and second - first < 16


def memory(url: str, process: psutil.Process) -> list[int]:
    """Return resident bytes after each of STOPS."""
    found = []
    with httpx.Client(base_url=url, timeout=120) as client:
        while client.get("/health").status_code != 200:
            time.sleep(0.05)
        for begin, end in zip((0, *STOPS), STOPS, strict=False):
            ask_all(client, range(begin, end))
            found.append(process.memory_info().rss)
    return found
