"""What tests of the server share: streams, prompts, connections, and servers with sharesd's own engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from serve.command import load_model
from sharesd.config import EngineConfig
from tests.helpers.serve_requests import CHAT, TEXT
from tests.helpers.served_model import Served, served
from tests.helpers.tiny_models import make_checkpoint

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def bodies(said: str = "the cat") -> dict[str, dict[str, Any]]:
    """A body of each API."""
    talk = {"messages": [{"role": "user", "content": said}], "max_tokens": 6}
    responses = {"input": said, "max_output_tokens": 6}
    return {
        TEXT: {"prompt": said, "max_tokens": 6},
        CHAT: talk,
        MESSAGES: {"model": "fake", **talk},
        RESPONSES: responses,
    }


@contextmanager
def real(config: EngineConfig, load: Any = load_model, **settings: Any) -> Iterator[Served]:
    """Serve the model of a configuration; ready."""
    made = partial(load, config, config.mode, None)
    with served(made, settings={"max_batch": config.max_batch, **settings}) as running:
        running.wait(lambda: running.http.get("/health").status_code == 200)
        yield running


def make_model(folder: Path, template: str, **sizes: int) -> Path:
    """Write a tiny random model with this chat template and return its folder."""
    config = make_checkpoint(folder, **sizes) / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    return folder


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream that has ended as it should."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "[DONE]" and "[DONE]" not in lines[:-1]
    return [json.loads(line) for line in lines[:-1]]


def stream(server: Served, path: str = TEXT, **body: Any) -> list[dict[str, Any]]:
    response = server.post(path, stream=True, **body)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def sent(server: Served, body: bytes, length: int | None = None) -> socket.socket:
    """A connection on which a completion is asked for, with the first bytes of a body of this length."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body)
    return sock


def prompt_of(server: Served) -> str:
    """The prompt of the last request, as the engine has it."""
    return server.engine.tokenizer.decode(server.engine.added[-1].prompt_ids, skip_special_tokens=False)


def shown(server: Served, messages: list[Any], **more: Any) -> str:
    """The prompt of a conversation, by /tokenize."""
    ids = server.post("/tokenize", messages=messages, **more).json()["tokens"]
    return server.engine.tokenizer.decode(ids, skip_special_tokens=False)


def is_taken(server: Served, text: str) -> bool:
    """Whether the grammar of the last request allows this answer."""
    ids = [*server.engine.tokenizer.encode(text), server.engine.tokenizer.eos_ids[0]]
    assert server.model is not None
    return server.model.grammars.matcher(server.engine.added[-1].params.grammar or "").advance(ids) == len(ids)
