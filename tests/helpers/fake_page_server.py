"""A server for the tests of the page: the page itself, and a chat that is made up. The question chooses how it goes."""

from __future__ import annotations

import json
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any
from zlib import crc32

from tests.helpers.openai_server import EVENTS, Answers
from tests.helpers.paths import ROOT

PAGE = ROOT / "serve" / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MODEL = "tiny"
KEY = "key-of-the-tests"
ROUNDS: list[list[tuple[str, str, str | None]]] = [
    [("The", "target", None)],
    [(" draft", "accepted", "share"), (" was", "accepted", "share"), (" right", "bonus", None)],
    [(" <b>here</b>", "accepted", "suffix"), (",\n", "recovered", None)],
    [("and", "recovered", None)],
    [(" wrong", "accepted", "suffix"), (" there", "accepted", "suffix"), (" é🙂", "bonus", None)],
    [(".", "target", None)],
]
"""What speculation gives for every question, again and again: (text, source, drafter) of each token."""
TOKENS_PER_SECOND = {True: 60.0, False: 40.0}
"""What the server says of its speed, by `speculate`."""


class FakeServer(ThreadingHTTPServer):
    """Questions with these words are special: `slow` takes 50 ms a round, `long` has 60 times the rounds, `differ` has
    another third token without speculation, `think` begins with reasoning, `broken` fails in the stream, `full`
    before it, `cut` hangs up."""

    daemon_threads = True

    wants_key = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        """A client left in the middle of an answer."""
        self.url = f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave; that is no news."""


class Handler(Answers):
    server: FakeServer

    def do_GET(self) -> None:
        path = PAGE / "index.html" if self.path == "/" else PAGE.parent / self.path.lstrip("/")
        if self.path == "/v1/models":
            if self._allowed():
                self._say(200, json.dumps({"object": "list", "data": [{"id": MODEL}]}))
        elif path.parent == PAGE and path.is_file():
            self._say(200, path.read_bytes(), TYPES[path.suffix])
        else:
            self._error(404, f"no {self.path}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            return
        self.server.requests.append(body)
        question = body["messages"][-1]["content"]
        if "full" in question:
            self._error(503, "the queue is full\n(64 requests): try again in 2 s")
            return
        self._begin(200, EVENTS)
        try:
            self._stream(question, body)
        except (BrokenPipeError, ConnectionResetError):
            self.server.hung_up.set()

    def _stream(self, question: str, body: dict[str, Any]) -> None:
        speculate = body["speculate"]
        self.wfile.write(b": reading the prompt\n\n")
        for number, tokens in enumerate(rounds_of(question, speculate)):
            if number == 3 and "broken" in question:
                self._event({"error": {"message": "the engine failed", "type": "server_error"}})
                break
            if number == 3 and "cut" in question:
                return
            time.sleep(0.05 if "slow" in question else 0.002)
            delta = {"content": "".join(token["text"] for token in tokens)}
            if number < 2 and "think" in question:
                delta = {"reasoning_content": delta["content"]}
                tokens = [token | {"reasoning": True} for token in tokens]
            traced = {"rounds": [trace_of(tokens)] if number else []} if body.get("round_details") else {}
            self._event({"choices": [{"index": 0, "delta": delta, "tokens": tokens, **traced}]})
        else:
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "tokens": []}]})
            speculative = {"tau": 2.5, "rounds": 4, "drafted": 9, "accepted": 5, "accepted_at": [3, 2]}
            if not speculate:
                speculative = {"tau": 1.0, "rounds": 12, "drafted": 0, "accepted": 0, "accepted_at": []}
            speculative["tokens_per_second"] = TOKENS_PER_SECOND[speculate]
            self._event({"choices": [], "usage": {"completion_tokens": 13}, "speculative": speculative})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode())

    def _allowed(self) -> bool:
        if self.server.wants_key and self.headers["Authorization"] != f"Bearer {KEY}":
            self._error(401, "the API key is missing or wrong")
            return False
        return True

    def _error(self, status: int, message: str) -> None:
        self._say(status, json.dumps({"error": {"message": message, "type": "error", "param": None, "code": None}}))


def trace_of(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """The trace of a round, with a draft token more than was accepted; without drafts it is a plain step."""
    texts = [token["text"] for token in tokens if token["source"] == "accepted"]
    times = {"draft_s": 0.0012, "verify_s": 0.02, "overhead_s": 0.0}
    drafted = {"texts": [*texts, " no"], "reasons": []} if texts else {"texts": [], "reasons": ["plain_is_faster"]}
    named = {"drafter": "share" if texts else None, "filler": None, "filled": 0, "probs": [0.5] if texts else None}
    return {**drafted, **named, **times, "accepted": [*range(len(texts))], "emitted": [1] * len(tokens)}


def rounds_of(question: str, speculate: bool) -> list[list[dict[str, Any]]]:
    rounds = ROUNDS * (60 if "long" in question else 1)
    if not speculate:
        rounds = [[(text, "target", None)] for tokens in rounds for text, *_ in tokens]
        if "differ" in question:
            rounds[2] = [(" is", "target", None)]
    keys = ("text", "source", "drafter")
    return [[dict(zip(keys, each, strict=True), id=crc32(each[0].encode())) for each in tokens] for tokens in rounds]
