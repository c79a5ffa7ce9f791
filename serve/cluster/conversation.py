"""Key of a conversation, equal for all of its requests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

MAX_LEADING = 256
"""Characters, or token ids, of a prompt that count."""


def conversation_of(body: bytes) -> str:
    """Return a hash of the beginning that all turns share, or "".

    It has the messages up to the first of the user, or the beginning of a prompt.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):  # the application says what is wrong
        return ""
    if not isinstance(given, Mapping):
        return ""
    turns = next((given[name] for name in ("messages", "input", "prompt") if given.get(name)), None)
    if turns is None:
        return ""
    if isinstance(given.get("input"), str):
        turns = [{"role": "user", "content": turns}]  # later turns are a list
    leading = [given.get("system"), given.get("instructions"), _leading(turns)]
    return hashlib.sha256(json.dumps(leading).encode()).hexdigest()


def _leading(turns: Any) -> Any:
    if not isinstance(turns, list):
        return turns[:MAX_LEADING] if isinstance(turns, str) else None
    users = (place for place, turn in enumerate(turns) if isinstance(turn, Mapping) and turn.get("role") == "user")
    first = next(users, None)
    if first is None:
        return turns[:MAX_LEADING]
    return [[turn.get("role"), turn.get("content")] for turn in turns[: first + 1] if isinstance(turn, Mapping)]


def preference(conversation: str, replica: str) -> bytes:
    """Return the rank of a replica for a conversation.

    The highest is taken. A replica that comes or goes moves its own conversations alone (rendezvous hashing).
    """
    return hashlib.sha256(f"{conversation} {replica}".encode()).digest()
