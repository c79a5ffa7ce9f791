"""Probes of a chat template: how it writes calls, and which contents it reads (a text, a list of parts, both)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sharesd.data.chat_messages import text_of

NAMES = ("probe_first", "probe_second")
"""Names of the functions in probes."""
USER = {"role": "user", "content": "probe"}
SAID = "probe-answer"
TEXTS = ("probe-content", "probe-second")
"""Texts of the probed parts."""
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
"""`Tokenizer.render_chat`, with contents as they are given."""


def written(render: Render, calls: Sequence[dict[str, Any]], content: str | None = "") -> str | None:
    """Return the text of a turn with calls; None if refused.

    A call is `{"name", "arguments"}`. Without calls, the turn has the content SAID. The text begins after the user's
    turn.
    """
    made = [{"id": f"probe{index:04d}", "type": "function", "function": dict(call)} for index, call in enumerate(calls)]
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


def with_calls_in_form(messages: Sequence[Mapping[str, Any]], form: CallForm) -> list[dict[str, Any]]:
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


class ContentForm(NamedTuple):
    """Contents that a template reads in messages of one role."""

    text: bool = True
    parts: bool = False

    def of(self, content: Any) -> Any:
        """Return a content in the form that the template reads.

        A list stays a list where the template iterates over it; elsewhere it becomes a text with a line per part. A
        text becomes a list for templates that read nothing else.
        """
        if isinstance(content, list):
            return content if self.parts else text_of(content)
        return content if self.text else [{"type": "text", "text": content}]


def content_form(render: Render, role: str, with_tools: bool) -> ContentForm:
    """Return the contents that a template reads in messages of a role.

    What it does with a content is tried, since templates test, loop and use macros in too many ways to be parsed. A
    list counts as read if all of its texts are shown, and not as the list's own notation.
    """
    asked = (
        USER if role == "user" else {**USER, "content": content_form(render, "user", with_tools).of(USER["content"])}
    )

    def shows(content: Any) -> bool:
        try:
            shown = render(_conversation(role, content, asked), False, tools=TOOLS if with_tools else None)
        except ValueError:
            return False
        texts = TEXTS if isinstance(content, list) else TEXTS[:1]
        return all(text in shown and f"'{text}'" not in shown and f'"{text}"' not in shown for text in texts)

    parts = shows([{"type": "text", "text": text} for text in TEXTS])
    return ContentForm(text=shows(TEXTS[0]) or not parts, parts=parts)


def with_contents_in_form(
    messages: Sequence[Mapping[str, Any]], form_of: Callable[[str], ContentForm]
) -> list[dict[str, Any]]:
    """Return messages with contents in a template's form; `form_of` is asked for each role."""
    return [
        {**one, "content": form_of(one["role"]).of(one["content"])} if one.get("content") else {**one}
        for one in messages
    ]


def _conversation(role: str, content: Any, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    message = {"role": role, "content": content}
    match role:
        case "user":
            return [message]
        case "system":
            return [message, dict(asked)]
        case "tool":
            call = {"id": "probe0000", "type": "function", "function": {"name": NAMES[0], "arguments": ARGUMENTS}}
            called = {"role": "assistant", "content": None, "tool_calls": [call]}
            return [dict(asked), called, {**message, "tool_call_id": call["id"], "name": NAMES[0]}]
        case _:
            return [dict(asked), message]
