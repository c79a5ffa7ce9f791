"""A server that speaks as much of OpenAI's protocol as a load needs, and fails on request.

As a program, `openai_server.py --mode MODE --port 0 [--text TEXT | --dies]`, it is what `--spawn` starts.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import sleep
from typing import Any

GAP_S = 0.03
RUNS = ("one", " two\u2028three", " four")
"""What the chunks of an answer say; the middle one holds two tokens, and a character at which lines could be cut."""
TOKENS = 4
EVENTS = {"Content-Type": "text/event-stream"}


class FakeServer(ThreadingHTTPServer):
    """Prompts that begin with ! and the name of a failure fail in that way; the others are answered."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *, mode: str = "naive", usage: bool = True, ids: bool = False, text: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.mode, self.usage, self.ids, self.text = mode, usage, ids, text
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.unhealthy = 2
        """So many times /health says 503."""
        self.num_answered = 0
        self.lock = threading.Lock()
        self.ends = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    """Answers in one piece, or begins a stream; logs nothing."""

    def log_message(self, *_: Any) -> None:
        pass

    def _say(self, status: int, data: str | bytes, kind: str = "application/json") -> None:
        data = data.encode() if isinstance(data, str) else data
        self._begin(status, {"Content-Type": kind, "Content-Length": str(len(data))})
        self.wfile.write(data)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


class Handler(Answers):
    server: FakeServer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._say(200, json.dumps({"data": [{"id": "fake-model", "root": "fake"}]}))
        elif self.path == "/health":
            self.server.unhealthy -= 1
            self._say(503 if self.server.unhealthy >= 0 else 200, "{}")
        elif self.path == "/metrics" and self.server.mode != "naive":
            n = self.server.num_answered
            counts = {"drafts": 2 * n, "draft_tokens": 6 * n, "accepted_tokens": 3 * n}
            lines = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {num}' for name, num in counts.items()]
            lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {n}' for i in range(3)]
            lines += ["vllm:spec_decode_num_drafts_created 1e9", "other 1"]
            self._say(200, "\n".join(lines) + "\n")
        else:
            self._say(404, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        chat = self.path == "/v1/chat/completions"
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        name = prompt.split()[0][1:] if isinstance(prompt, str) and prompt.startswith("!") else ""
        statuses = {"refused": 429, "full": 503, "rejected": 400, "broken": 500}
        if name in statuses:
            self._say(statuses[name], json.dumps({"error": {"message": f"it is {name}\nreally"}}))
            return
        self._begin(200, EVENTS | ({"Content-Length": "100000"} if name == "cut" else {}))
        if name in ("silent", "odd"):
            self._event("[DONE]" if name == "silent" else '{"choices": 7}')
            return
        if chat:
            self._choice({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        for i, text in enumerate(RUNS):
            sleep(GAP_S)
            if i == 1 and name in ("cut", "dropped"):
                return
            if i == 1 and name == "error":
                self._event(json.dumps({"error": {"message": "the engine failed"}}))
                self._event("[DONE]")
                return
            if name == "slow":
                self.server.ends.wait(600)
                return
            text += self.server.text if i == 2 else ""
            ids = {"token_ids": list(range(len(text.split())))} if self.server.ids else {}
            finish = "length" if i == 2 else None
            self._choice({**({"delta": {"content": text}} if chat else {"text": text}), "finish_reason": finish, **ids})
        if self.server.usage:
            self._event(json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": TOKENS}}))
        with self.server.lock:
            self.server.num_answered += 1
        self._event("[DONE]")

    def _choice(self, choice: dict[str, Any]) -> None:
        self._event(json.dumps({"choices": [choice]}, ensure_ascii=False))

    def _event(self, data: str) -> None:
        self.wfile.write(f": a comment\ndata: {data}\n\n".encode())
        self.wfile.flush()


@contextmanager
def serving(**settings: Any) -> Iterator[FakeServer]:
    with FakeServer(**settings) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            server.ends.set()
            server.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode")
    parser.add_argument("--port", type=int)
    parser.add_argument("--text", default="")
    parser.add_argument("--dies", action="store_true")
    args = parser.parse_args()
    assert args.port == 0
    if args.dies:
        sys.exit("no such model")
    with FakeServer(mode=args.mode, text=args.text if args.mode != "naive" else "") as program:
        print(f"INFO: running on {program.url} (Ctrl-C stops it)", file=sys.stderr)
        program.serve_forever()
