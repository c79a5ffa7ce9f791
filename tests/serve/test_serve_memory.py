"""Memory of a server's process after 10,000 requests of all kinds."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.tiny_models import make_checkpoint
from tests.serve.test_responses_api import TEMPLATE

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
STOPS = (2000, 6000, 10_000)
"""Numbers of requests after which memory is read."""
CLIENTS = 4
MIB = 2**20
Body = dict[str, Any]


def function(number: int) -> Body:
    """Return a function whose schema no other request has."""
    schema = {"type": "object", "properties": {f"city{number}": {"enum": ["the mat", "a cat"]}}}
    return {"name": f"get_{number}", "description": "d", "parameters": schema | {"additionalProperties": False}}


def streamed(client: httpx.Client, path: str, body: Body) -> None:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert '{"error"' not in response.read().decode()


def hang_up(client: httpx.Client, path: str, body: Body) -> None:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        next(response.iter_lines())


def hang_up_before_the_answer(client: httpx.Client, path: str, body: Body) -> None:
    with contextlib.suppress(httpx.TimeoutException):
        client.post(path, json=body, timeout=0.005)


def whole(client: httpx.Client, path: str, body: Body) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text


def refused(client: httpx.Client, path: str, body: Body) -> None:
    assert client.post(path, json=body).status_code in (400, 404)


def request(number: int) -> tuple[Callable[[httpx.Client, str, Body], None], str, Body]:
    """Return one of many kinds of requests, with texts of its own."""
    dice = random.Random(number)
    said = " ".join(dice.choice(("the", "cat", "mat", "sky", "red")) for _ in range(dice.randint(2, 30)))
    talk = {"messages": [{"role": "user", "content": f"{said} {number}"}], "temperature": dice.choice((0, 0.8))}
    chat: Body = {**talk, "max_tokens": dice.randint(2, 8), "seed": number}
    text: Body = {"prompt": f"{said} {number}", "max_tokens": dice.randint(2, 8), "seed": number}
    tools = {"tools": [{"type": "function", "function": function(number)}]}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": function(number)["parameters"]}}
    kinds = (
        (whole, TEXT, {**text, "logprobs": 3, "n": 2, "echo": True}),
        (streamed, TEXT, {**text, "stream_options": {"include_usage": True}, "token_details": True}),
        (whole, CHAT, {**chat, "stop": [f"sat{number}", "mat"], "logit_bias": {str(5 + number % 300): -5}}),
        (streamed, CHAT, chat),
        (streamed, CHAT, {**chat, **tools, "max_tokens": 12}),
        (whole, CHAT, {**chat, **tools, "tool_choice": "required", "max_tokens": 12}),
        (whole, CHAT, {**chat, "response_format": schema, "max_tokens": 12}),
        (hang_up, CHAT, {**chat, "max_tokens": 100}),
        (hang_up_before_the_answer, TEXT, {**text, "max_tokens": 100}),
        (refused, CHAT, {**chat, f"unknown{number}": 1}),
        (refused, TEXT, {**text, "model": f"other{number}"}),
        (refused, CHAT, {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": f"x{number}"}}}),
        (streamed, "/v1/responses", {"input": f"{said} {number}", "max_output_tokens": 4}),
        (whole, "/v1/messages", {**talk, "model": "t", "max_tokens": 4}),
        (whole, "/tokenize", {"prompt": f"{said} {number}"}),
    )
    return kinds[number % len(kinds)]


def ask(client: httpx.Client, number: int) -> None:
    send, path, body = request(number)
    send(client, path, body)


@pytest.mark.long
def test_memory_is_flat(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", layers=1)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
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
    first, second, third = (found[number] / MIB for number in STOPS)
    print(f"RSS {first:.1f}, {second:.1f}, {third:.1f} MiB after {', '.join(map(str, STOPS))} requests")
    assert third - second < 8 and second - first < 16


def memory(url: str, process: psutil.Process) -> dict[int, int]:
    """Return resident bytes by number of requests."""
    found, begun = {}, 0
    with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(CLIENTS) as pool:
        while client.get("/health").status_code != 200:
            time.sleep(0.05)
        for end in STOPS:
            list(pool.map(lambda number: ask(client, number), range(begun, end)))
            begun = end
            while num_requests(client):
                time.sleep(0.05)
            found[end] = process.memory_info().rss
    return found


def num_requests(client: httpx.Client) -> float:
    """Return the number of requests that run or wait."""
    names = ("sharesd:num_requests_running{", "sharesd:num_requests_waiting{")
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))
