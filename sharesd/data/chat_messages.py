"""Chat messages and tools in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

EXAMPLE = '[{"role": "user", "content": "..."}]'
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of an assistant's reasoning in messages and in templates."""

Content = str | list[dict[str, str]] | None


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates read.

    `developer` becomes `system`, arguments of calls become objects, results of calls get the function's name, and
    reasoning is `reasoning_content`. Contents are texts or lists of text parts, as given; `Tokenizer.render_chat`
    gives a template the form that it reads. ValueError for an empty list, an item that is not a message, or a content
    that is not text.
    """
    if not messages:
        raise ValueError(f"messages is empty; give at least one, as {EXAMPLE}")
    shown = [_message(index, message) for index, message in enumerate(messages)]
    names: dict[Any, Any] = {}
    for message in shown:
        names |= {call.get("id"): call["function"].get("name") for call in message.get("tool_calls") or ()}
        name = message.get("name") or names.get(message.get("tool_call_id") or "")
        if name:
            message["name"] = name
    return shown


def tool_for_template(index: int, tool: Any) -> dict[str, Any]:
    """Return `tools[index]`, a function as OpenAI describes it, in the form of chat templates; ValueError if wrong."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        example = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
        raise ValueError(f"tools[{index}] is {tool!r:.80}; give {example}")
    return function_for_template(function["name"], function.get("description"), function.get("parameters"))


def function_for_template(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a function in the form of chat templates; without `parameters` it has no arguments."""
    described = {} if description is None else {"description": description}
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def text_of(content: Content) -> str:
    """Return a content as one text, with a line per part."""
    return content or "" if not isinstance(content, list) else "\n".join(part["text"] for part in content)


def _message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{index}] is {message!r:.80}, which has no role; give messages as {EXAMPLE}")
    shown = {name: value for name, value in message.items() if name not in REASONING}
    shown["role"] = "system" if message["role"] == "developer" else message["role"]
    thoughts = next((message[name] for name in REASONING if message.get(name)), None)
    if thoughts is not None and message["role"] == "assistant":
        shown[REASONING[0]] = thoughts
    calls, content = message.get("tool_calls"), message.get("content")
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise ValueError(f"tool_calls of messages[{index}] is {calls!r:.80}; give a list")
    if content is None and not calls and REASONING[0] not in shown:
        raise ValueError(f"messages[{index}], of role {message['role']}, has no content; give it a text")
    shown["content"] = None if calls and content is None else _content(index, content)
    if calls:
        shown["tool_calls"] = [_call(index, call) for call in calls]
    return shown


def _content(index: int, content: Any) -> Content:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise ValueError(f"the content of messages[{index}] is {content!r:.80}; give a text")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"messages[{index}] has content of type {kind!r}; the model reads text alone")
    return [{"type": "text", "text": part["text"]} for part in content] or ""


def _call(index: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(
            f"messages[{index}] has a tool call {call!r:.80} without a function; give its name and arguments"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"messages[{index}]: the arguments {function['arguments']!r:.80} are not a JSON object; give a dict or its "
            "JSON, or leave the call out"
        )
    return {**call, "function": {**function, "arguments": arguments}}
