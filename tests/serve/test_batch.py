"""Lines of a batch file get what the server answers to the same bodies, errors included."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from serve.batch import _answers, _running
from serve.server_config import ServerSettings
from sharesd.cli.batch_requests import URLS, BatchLine, batch_lines
from sharesd.cli.generate_file import read
from sharesd.cli.user_text import encode
from sharesd.llm import LLM
from tests.helpers.fake_engine import fake_model
from tests.helpers.served_model import Served, served

CHAT, TEXT, RESPONSES, MESSAGES = URLS
FOLDER = Path(__file__).parents[1] / "models/chat_templates"
TEMPLATE = (FOLDER / "qwen3_6.jinja").read_text("utf-8")
"""Thinking that the template opens, and calls with a tag for each argument."""
XML_CALL = "<tool_call>\n<function=climb>\n<parameter=tree>\nred mat\n</parameter>\n</function>\n</tool_call>"
SCRIPTS = {"why is the sky": "how is it\n</think>\n\nthe mat", "the red cat": f"why\n</think>\n\n{XML_CALL}"}
USER = {"role": "user", "content": "the cat sat"}
WHY = {"role": "user", "content": "why is the sky blue"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "the cat"}, {"type": "text", "text": "sat"}]}
SCHEMA = {"type": "object", "properties": {"tree": {"type": "string"}}, "required": ["tree"]}
TOOLS = [{"type": "function", "function": {"name": "climb", "parameters": SCHEMA}}]
SHAPED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


def chat(*messages: Any, **more: Any) -> tuple[str, Any]:
    return CHAT, {"messages": list(messages or (USER,)), "seed": 5, "max_tokens": 8} | more


def text(prompt: Any = "the cat", **more: Any) -> tuple[str, Any]:
    return TEXT, {"prompt": prompt, "seed": 5, "max_tokens": 6} | more


BODIES: dict[str, tuple[str, Any]] = {
    "thoughts": chat(WHY, max_tokens=60),
    "thoughts left in": chat(WHY, max_tokens=60, reasoning_format="none"),
    "parts": chat({"role": "developer", "content": PARTS["content"]}, PARTS),
    "samples": chat(n=3, temperature=0.7, top_p=0.9, top_k=-1, min_p=0.1),
    "JSON": chat(response_format={"type": "json_object"}, max_tokens=40),
    "a schema": chat(response_format=SHAPED, max_tokens=40),
    "tools": chat({"role": "user", "content": "the red cat"}, tools=TOOLS, max_tokens=120),
    "continued": chat(USER, {"role": "assistant", "content": "the"}, continue_final_message=True),
    "no limit": (CHAT, {"messages": [USER], "seed": 5}),
    "texts": text(["the cat", "a mat"], n=2),
    "echo with logprobs": text(echo=True, logprobs=2, max_tokens=0),
    "16 tokens": (TEXT, {"prompt": "the cat", "seed": 5, "stop": "zz"}),
    "a response": (RESPONSES, {"input": "the cat", "max_output_tokens": 8, "temperature": 0}),
    "a message": (MESSAGES, {"model": "fake", "messages": [USER], "max_tokens": 8, "temperature": 0}),
    # refused
    "unknown field": chat(unknown_key=1),
    "out of range": chat(temperature=-1),
    "no messages": (CHAT, {"messages": []}),
    "other model": chat(model="other"),
    "prompt too long": chat({"role": "user", "content": "the cat " * 3000}),
    "no such variable": chat(chat_template_kwargs={"red": 1}),
    "no such tool": chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "fly"}}),
    "wrong grammar": chat(structured_outputs={"regex": "("}),
    "id beyond the vocabulary": text([10**6]),
    "refused by the engine": chat({"role": "user", "content": "why blue"}),
    "no numbers": chat({"role": "user", "content": "why green"}),
    "a message without a limit": (MESSAGES, {"model": "fake", "messages": [USER]}),
}


Lines = dict[str, dict[str, Any]]
Both = tuple[Served, Lines]


def lines_of(bodies: dict[str, tuple[str, Any]]) -> Lines:
    """Output lines of these bodies as a batch file."""
    rows = [{"custom_id": each, "method": "POST", "url": url, "body": body} for each, (url, body) in bodies.items()]
    lines = [line for _, line in batch_lines([(f"b:{i}", row) for i, row in enumerate(rows)])]
    assert not any(line.error for line in lines)
    settings = ServerSettings(model_name="fake", root="fake", mode="suffix", max_batch=4, max_queue=2**31)

    class Tasks:
        left = list(enumerate(lines))

        def take(self, wait: bool) -> Any:
            return self.left.pop(0) if self.left else None

    async def calls() -> set[Any]:
        return service.calls

    with _running(settings, scripted_model) as (service, loop):
        found = dict(_answers(service, loop, Tasks(), seed=0))
        assert not asyncio.run_coroutine_threadsafe(calls(), loop).result()
    return {line["custom_id"]: line for _, line in sorted(found.items())}


def scripted_model() -> Any:
    model = fake_model(template=TEMPLATE, max_context=2048)
    model.engine.scripts |= SCRIPTS  # type: ignore[attr-defined]
    return model


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with served(scripted_model) as server:
        server.wait(lambda: server.http.get("/health").status_code == 200)
        yield server, lines_of(BODIES)


def scrubbed(value: Any) -> Any:
    """A value without ids, times, and what depends on requests before it."""
    if isinstance(value, list):
        return [scrubbed(one) for one in value]
    if not isinstance(value, dict):
        return value
    own = {"id", "call_id", "created", "created_at", "cached_tokens", "cache_read_input_tokens", "input_tokens"}
    return {name: scrubbed(one) for name, one in value.items() if name not in own}


@pytest.mark.parametrize("name", BODIES)
def test_a_line_gets_the_servers_answer(name: str, both: Both) -> None:
    (server, lines), (url, body) = both, BODIES[name]
    line, theirs = lines[name], server.http.post(url, json=body)
    expected = theirs.json()
    if theirs.status_code == 200:
        assert line["error"] is None and line["response"]["status_code"] == 200
        assert scrubbed(line["response"]["body"]) == scrubbed(expected)
    else:
        assert line["response"] is None
        assert line["error"] == {"status_code": theirs.status_code, **expected["error"]}


def test_the_table_holds_thoughts_calls_and_refusals(both: Both) -> None:
    """So that the comparison above compares something."""
    bodies = [line["response"]["body"] for line in both[1].values() if line["response"]]
    messages = [body["choices"][0].get("message", {}) for body in bodies if "choices" in body]
    assert any(message.get("reasoning_content") and message.get("content") for message in messages)
    assert any(message.get("tool_calls") for message in messages)
    assert sum(line["error"] is not None for line in both[1].values()) >= 11


def test_lines_without_a_seed_depend_on_their_place_alone() -> None:
    def asked(said: str, **more: Any) -> tuple[str, Any]:
        return CHAT, {"messages": [{"role": "user", "content": said}], "max_tokens": 150, "temperature": 1.0, **more}

    bodies = {"0": asked("the red cat", tools=TOOLS)} | {str(place): asked("a mat") for place in range(1, 5)}
    first, second = (lines_of(bodies) for _ in range(2))
    for line in (*first.values(), *second.values()):
        line.pop("stats")
        line["response"]["body"]["usage"].pop("prompt_tokens_details")
    assert json.dumps(first) == json.dumps(second), "ids of calls and times included"
    messages = [line["response"]["body"]["choices"][0]["message"] for line in first.values()]
    assert messages[0]["tool_calls"] and len(set(map(json.dumps, messages))) == 5, "each has noise of its own"


@pytest.mark.parametrize(("name", "shown"), [("qwen3", "the\n cat"), ("qwen3_vl", "the cat")])
def test_parts_are_the_same_prompt_everywhere(name: str, shown: str, tmp_path: Path) -> None:
    """A template that tests for text, and one that iterates over parts."""
    template, file = (FOLDER / f"{name}.jinja").read_text("utf-8"), tmp_path / "prompts.jsonl"
    talk = [{"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": " cat"}]}]
    file.write_text(json.dumps({"messages": talk}))
    [(_, prompt)] = read(file, raw=False)
    assert not isinstance(prompt, BatchLine)
    with served(template=template) as server:
        tokenizer = server.engine.tokenizer
        asked = [
            server.post("/tokenize", messages=talk).json()["tokens"],
            encode(tokenizer, prompt, raw=False, system=None),
            LLM._chat_ids(cast(LLM, SimpleNamespace(_tokenizer=tokenizer)), talk, None),
            tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": shown}]), False),
        ]
    assert asked == [asked[0]] * 4
    [(_, raw)] = read(file, raw=True)
    assert raw == "the\n cat"
