"""Probe of a chat template: calls as it writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

NAMES = ("probe_first", "probe_second")
"""Names of the functions in probes."""
USER = {"role": "user", "content": "probe"}
SAID = "probe-answer"
ARGUMENTS = {"probe_key": "probe-value", "probe_more": "probe-other"}
PARAMETERS = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ARGUMENTS},
    "required": ["probe_key"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "probe", "parameters": PARAMETERS}}
    for name in ("probe_other", *NAMES)
]

Render = Callable[..., str]
"""`Tokenizer.render_chat`."""


def written(render: Render, calls: Sequence[dict[str, Any]], content: str | None = "") -> str | None:
    """Return the text of a turn with calls; None if refused.

    A call is `{"name", "arguments"}`. Without calls, the turn has the content SAID. The text begins after the user's
    turn.
    """
    made = [{"id": f"probe{place:04d}", "type": "function", "function": dict(call)} for place, call in enumerate(calls)]
    turn = {"role": "assistant", "content": content, "tool_calls": made}
    try:
        before = render([USER], False, tools=TOOLS)
        after = render([USER, turn if calls else {"role": "assistant", "content": SAID}], False, tools=TOOLS)
    except ValueError:
        return None
    return after[len(before) :] if after.startswith(before) else after.rpartition(USER["content"])[2]


class CallForm(NamedTuple):
    """Form in which a template shows calls."""

    content: str | None = ""
    """Content of a turn without text."""
    as_text: bool = False
    """True if arguments are JSON texts, not objects."""


def call_form(render: Render) -> CallForm:
    """Return the form in which a template shows calls, if it does."""
    for as_text in (False, True):
        arguments = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
        for content in ("", None):
            shown = written(render, [{"name": NAMES[0], "arguments": arguments}], content)
            if shown is not None and NAMES[0] in shown:
                return CallForm(content, as_text)
    return CallForm()


def in_form(messages: Sequence[Mapping[str, Any]], form: CallForm) -> list[dict[str, Any]]:
    """Return messages with calls in a template's form."""
    return [_in_form(message, form) if message.get("tool_calls") else dict(message) for message in messages]


def _in_form(message: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    shown = {**message, "content": message.get("content") or form.content}
    if form.as_text:
        functions = [dict(call["function"]) for call in message["tool_calls"]]
        for function in functions:
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls = zip(message["tool_calls"], functions, strict=True)
        shown["tool_calls"] = [{**call, "function": function} for call, function in calls]
    return shown
