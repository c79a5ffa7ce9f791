"""Paths, messages and error checks for tests of the server."""

from __future__ import annotations

from typing import Any

import httpx

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "the cat"}]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error, which has OpenAI's shape and is small."""
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"] and len(response.content) < 1000
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"] and error["message"]
    return error
