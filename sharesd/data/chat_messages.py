"""Chat messages in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

EXAMPLE = '[{"role": "user", "content": "..."}]'


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates read.

    Contents are one text, tool arguments objects, and `developer` is `system`. ValueError for an empty list, an item
    that is no message, or a content that is not text.
    """
    if not messages:
        raise ValueError(f"messages is empty; give at least one, as {EXAMPLE}")
    return [_message(place, message) for place, message in enumerate(messages)]


def _message(place: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{place}] is {message!r:.80}, which has no role; give messages as {EXAMPLE}")
    shown = {**message, "role": "system" if message["role"] == "developer" else message["role"]}
    calls = message.get("tool_calls")
    if message.get("content") is None and not calls:
        raise ValueError(f"messages[{place}], of role {message['role']}, has no content; give it a text")
    content = message.get("content")
    shown["content"] = None if calls and content is None else _text(place, content)
    if calls:
        shown["tool_calls"] = [_call(place, call) for call in calls]
    return shown


def _text(place: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"the content of messages[{place}] is {content!r:.80}; give a text")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"messages[{place}] has content of type {kind!r}; the model reads text alone")
    return "\n".join(part["text"] for part in content)


def _call(place: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(
            f"messages[{place}] has a tool call {call!r:.80} without a function; give its name and arguments"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ValueError(
                f"messages[{place}]: the arguments {arguments!r:.80} are no JSON; give an object"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}
