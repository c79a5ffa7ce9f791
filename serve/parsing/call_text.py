"""Pieces of tool calls in text: JSON objects, and white space."""

from __future__ import annotations

import json
from typing import Literal

from serve.parsing.tool_format import ToolFormat


def white(text: str, end: Literal[0, -1]) -> str:
    """Return the white space at a text's beginning (0) or end (-1)."""
    return text[: len(text) - len(text.lstrip())] if end == 0 else text[len(text.rstrip()) :]


class Braces:
    """Incremental search for the end of a JSON object."""

    def __init__(self, depth: int = 0) -> None:
        """Start with `depth` open brackets."""
        self._depth, self._quoted, self._escaped = depth, False, False

    def feed(self, text: str) -> int | None:
        """Return the length up to the object's end; None if not reached."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


def call_in(text: str, form: ToolFormat) -> tuple[str, str | None]:
    """Return name and arguments of a call; None for other objects."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return "", None
    name = found.get(form.name_key, found.get("name"))
    arguments = found.get(form.key, found.get("arguments", found.get("parameters")))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return "", None
    return name, json.dumps(arguments, ensure_ascii=False)
