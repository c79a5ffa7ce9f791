"""Probe of a chat template: calls as it writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

NAMES = ("probe_first", "probe_second")
"""Names of the functions in probes."""
USER = {"role": "user", "content": "probe"}
PARAMETERS = {"type": "object", "properties": {"probe_key": {"type": "string"}}, "required": ["probe_key"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "probe", "parameters": PARAMETERS}}
    for name in ("probe_other", *NAMES)
]

Render = Callable[..., str]
"""`Tokenizer.render_chat`."""


def written(render: Render, calls: Sequence[dict[str, Any]], content: str | None = "") -> str | None:
    """Return the text of a turn with calls; None if refused.

    A call is `{"name", "arguments"}`. The assistant's text goes from the end of the user's turn to the end.
    """
    made = [{"id": f"probe{place:04d}", "type": "function", "function": dict(call)} for place, call in enumerate(calls)]
    try:
        before = render([USER], False, tools=TOOLS)
        after = render([USER, {"role": "assistant", "content": content, "tool_calls": made}], False, tools=TOOLS)
    except ValueError:
        return None
    return after[len(before) :] if after.startswith(before) else after.rpartition(USER["content"])[2]


def empty_content(render: Render) -> str | None:
    """Return the content, "" or None, with which calls are shown."""
    call = {"name": NAMES[0], "arguments": {"probe_key": "x"}}
    shown = (content for content in ("", None) if NAMES[0] in (written(render, [call], content) or ""))
    return next(shown, "")
