"""Bodies as programs send them: editors, chat pages, coding assistants, benchmarks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.serve_requests import CHAT, HELLO, TEXT, error_of
from tests.helpers.served_model import Served
from tests.serve.test_responses_api import SERVED  # noqa: F401

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"], "$schema": "draft-07"}
READ: dict[str, Any] = {"name": "read_file", "description": "d", "parameters": SCHEMA}
TOOLS = {"tools": [{"type": "function", "function": READ}]}
CALL = {"id": "a", "type": "function", "function": {"name": "read_file", "arguments": ""}}
PARTS = [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "a", "name": "read_file", "content": PARTS}
CACHED = {"type": "text", "text": "the cat", "cache_control": {"type": "ephemeral"}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
BEGINNINGS = ("class", "def", "function", "module", "export", "import", "while", "for", "if", "return", "with", "try")
MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>", "</code>", "```", "\r\n\r\n")
STOPS = [*MARKS, *(f"\n{word}" for word in BEGINNINGS)]
ANSWERED = {**dict.fromkeys(("refusal", "audio", "function_call", "tool_calls")), "annotations": []}
CLAUDE_CODE: dict[str, Any] = {"messages": [{"role": "user", "content": [CACHED]}], "system": [CACHED], "stream": True}
CLAUDE_CODE |= {"tools": [{"name": "Read", "type": "custom", "input_schema": SCHEMA}], "metadata": {"user_id": "x"}}
CLAUDE_CODE |= {
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": []},
    "output_config": {"effort": "high"},
}
CODEX: dict[str, Any] = {"instructions": "the", "reasoning": {"effort": "medium", "summary": "auto"}, "stream": True}
CODEX |= {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "cat"}]}]}
CODEX |= {"tools": [{"type": "function", **READ, "strict": False}], "text": {"verbosity": "medium"}, "store": False}
CODEX |= {"include": ["reasoning.encrypted_content"]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Open WebUI": (CHAT, {"messages": HELLO, **USAGE}),
    "Open WebUI, a title": (CHAT, {"messages": HELLO, "stream": False, "metadata": {"task": "title_generation"}}),
    "Continue, a chat": (CHAT, {"messages": HELLO, "stop": ["a", "b"], "parallel_tool_calls": False, **TOOLS}),
    "Continue, a completion": (TEXT, {"prompt": "<fim_prefix>the<fim_suffix>", "stop": STOPS}),
    "Cline": (CHAT, {"messages": [{"role": "user", "content": PARTS}], "reasoning_effort": "medium", **USAGE}),
    "Cline, a cached prompt": (CHAT, {"messages": [{"role": "system", "content": [CACHED]}, *HELLO]}),
    "Cline, a result": (CHAT, {"messages": [*HELLO, CALLED, RESULT], **TOOLS}),
    "Roo Code": (CHAT, {"messages": HELLO, "max_completion_tokens": 4, "tool_choice": "auto", **TOOLS, **USAGE}),
    "Zed": (CHAT, {"messages": HELLO, "stop": [], "prompt_cache_key": "x", "reasoning_effort": None, **TOOLS}),
    "LibreChat": (CHAT, {"messages": HELLO, "user": "x", "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}),
    "an answer sent back": (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "x", **ANSWERED}, *HELLO]}),
    "lm_eval, scores": (TEXT, {"prompt": [[5, 6, 7]], "logprobs": 1, "seed": 1234, "echo": True, "temperature": 0}),
    "lm_eval, texts": (TEXT, {"prompt": [[5, 6], [7]], "stop": ["\n\n", "<|endoftext|>"], "seed": 1234}),
    "lm_eval, a chat": (CHAT, {"messages": [{"role": "user", "content": "the cat", "type": "text"}], "seed": 1234}),
    "vLLM's benchmark": (TEXT, {"prompt": "the", "repetition_penalty": 1.0, "logprobs": None, **USAGE}),
    "SGLang's benchmark": (TEXT, {"prompt": "the", "best_of": 1, "ignore_eos": True, **USAGE}),
    "GuideLLM": (CHAT, {"messages": HELLO, "max_completion_tokens": 4, "stop": None, "ignore_eos": True, **USAGE}),
    "Claude Code": ("/v1/messages?beta=true", CLAUDE_CODE),
    "Codex": ("/v1/responses", CODEX),
}


@pytest.mark.parametrize("program", BODIES)
def test_a_programs_body_is_taken(server: Served, program: str) -> None:
    path, body = BODIES[program]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    more = {} if "max_completion_tokens" in body else {limit: 4}
    response = server.post(path, **{"model": "fake", **more, **body})
    assert response.status_code == 200 and '{"error"' not in response.text, response.text


WRONG_URLS = ["/chat/completions", "/models", "/v1/v1/models", "/api/chat", "/v1", "/props", "/v1/embeddings"]


@pytest.mark.parametrize("path", WRONG_URLS)
def test_a_wrong_url_is_told_what_there_is(server: Served, path: str) -> None:
    message = error_of(server.post(path, input="x"), 404)["message"]
    assert path in message and "/v1/chat/completions" in message and "/v1/responses" in message
