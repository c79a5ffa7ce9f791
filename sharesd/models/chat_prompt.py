"""Prompts of chats: the one way from messages to token ids, for the server, files, and Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sharesd.data.chat_messages import REASONING, tool_for_template
from sharesd.models.tokenizer import Tokenizer

MAX_SHOWN = 40
"""Maximum characters of a variable's name in an error."""
OPTIONAL = ("enable_thinking", "thinking", "reasoning_effort")
"""Variables that clients send to all models; templates without them ignore them."""

Ending = Literal["answer", "turn", "last message"]
"""End of a prompt: an assistant's header, a turn, or its text."""


class ChatError(ValueError):
    """Chat that a model's template does not show; `param` is the field that is wrong."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    ending: Ending = "answer",
    variables: Mapping[str, Any] | None = None,
    preferences: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the ids of a conversation.

    Args:
        messages: as `chat_messages.for_template` returns them.
        tools: functions as OpenAI describes them.
        variables: values of the template's variables.
        preferences: variables that count only if the template has them, as those of OPTIONAL do.

    Raises:
        ChatError: there is no chat template, it refuses the messages, or it drops a part of the conversation.
    """
    template = tokenizer.tool_template or ""
    if tools and not tokenizer.takes_tools:
        message = f"{len(tools)} tools are given, and the model's chat template shows none (it has no place for them)"
        raise ChatError(f"{message}; leave them out, or use a model that was trained with tools", "tools")
    try:
        tools = [tool_for_template(index, tool) for index, tool in enumerate(tools)]
    except ValueError as error:
        raise ChatError(str(error), "tools") from None
    if "tool_calls" not in template and any(message.get("tool_calls") for message in messages):
        raise ChatError("messages have tool_calls, which this model's chat template does not show", "messages")
    known_variables = tokenizer.template_variables
    wanted = {**(preferences or {}), **(variables or {})}
    optional = {*(preferences or ()), *OPTIONAL}
    wanted = {name: value for name, value in wanted.items() if name in known_variables or name not in optional}
    unknown = next((name for name in wanted if name not in known_variables), None)
    if unknown is not None:
        known = ", ".join(sorted(known_variables)) or "none"
        message = f"chat_template_kwargs has {unknown[:MAX_SHOWN]}; variables of this model's chat template: {known}"
        raise ChatError(message, "chat_template_kwargs")
    messages = [_with_reasoning(message, template) for message in messages]
    try:
        if ending == "last message":
            text = tokenizer.render_begun(messages, tools=tools, variables=wanted)
            return tokenizer.encode(text, add_special_tokens=False)
        return tokenizer.chat(messages, ending == "answer", tools=tools, variables=wanted)
    except ValueError as error:
        raise ChatError(str(error), "messages") from None


def _with_reasoning(message: Mapping[str, Any], template: str) -> Mapping[str, Any]:
    """Return a message with its reasoning under the template's name for it."""
    if REASONING[0] not in message:
        return message
    rest = {name: value for name, value in message.items() if name != REASONING[0]}
    return rest | {name: message[REASONING[0]] for name in REASONING if name in template}
