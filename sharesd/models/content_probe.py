"""Probe of a chat template: whether it reads the content of messages as a text, as a list of parts, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sharesd.data.chat_messages import text_of
from sharesd.models.call_probe import ARGUMENTS, NAMES, TOOLS, USER

TEXTS = ("probe-content", "probe-second")
"""Texts of the probed parts."""

Render = Callable[..., str]
"""`Tokenizer.render_chat`, with contents as they are given."""


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


def in_form(messages: Sequence[Mapping[str, Any]], form_of: Callable[[str], ContentForm]) -> list[dict[str, Any]]:
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
