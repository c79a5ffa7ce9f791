"""Token ids, texts and bytes of prompts and answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

from serve.engine_thread import Model
from serve.errors import MAX_SHOWN, ContextOverflow, invalid
from serve.reasoning import FIELDS
from serve.schemas import ChatBody, TokenizeBody
from serve.tool_format import FORMATS
from serve.tools import Function
from sharesd.models.text_stream import TextStream
from sharesd.models.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


OPTIONAL = ("enable_thinking", "thinking", "reasoning_effort")
"""Variables that clients send to all models; templates without them ignore them."""

Ending = Literal["answer", "turn", "last message"]
"""End of a prompt: an assistant's header, a turn, or its text."""


def ending_of(body: ChatBody | TokenizeBody) -> Ending:
    """Return the end of a request's prompt; ApiError 400 for two."""
    if not body.continue_final_message:
        return "turn" if body.add_generation_prompt is False else "answer"
    if body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt are both true; leave one out"
        raise invalid(message, "continue_final_message")
    return "last message"


def encode(model: Model, prompt: str | Sequence[int], add_special_tokens: bool = True) -> list[int]:
    """Return a prompt's ids; raises ApiError 400 for an invalid prompt."""
    ids = model.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else list(prompt)
    return _checked(model, ids, "prompt")


def encode_chat(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    functions: Sequence[Function] = (),
    ending: Ending = "answer",
    variables: Mapping[str, Any] | None = None,
    preferences: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the ids of a conversation.

    `preferences` are variables that count only if the template has them, as those of OPTIONAL do.
    Raises ApiError 400 without a chat template, or if the template drops a part of the conversation.
    """
    tokenizer, template = model.tokenizer, model.tokenizer.tool_template or ""
    if functions and not tokenizer.takes_tools:
        message = "tools are given, and this model's chat template has no place for them; leave them out"
        raise invalid(f"{message}, or serve a model that was trained with tools", "tools")
    if functions and model.tool_format is None:
        message = "tools are given, and this model's chat template does not tell how it writes calls; leave them out"
        raise invalid(f"{message}, or start the server with --tool-format {'|'.join(FORMATS)}", "tools")
    if "tool_calls" not in template and any("tool_calls" in message for message in messages):
        raise invalid("messages have tool_calls, which this model's chat template does not show", "messages")
    known_variables = tokenizer.template_variables
    wanted = {**(preferences or {}), **(variables or {})}
    optional = {*(preferences or ()), *OPTIONAL}
    wanted = {name: value for name, value in wanted.items() if name in known_variables or name not in optional}
    unknown = next((name for name in wanted if name not in known_variables), None)
    if unknown is not None:
        known = ", ".join(sorted(known_variables)) or "none"
        message = f"chat_template_kwargs has {unknown[:MAX_SHOWN]}; variables of this model's chat template: {known}"
        raise invalid(message, "chat_template_kwargs")
    messages = [_with_reasoning(message, template) for message in messages]
    tools = [function.for_template() for function in functions]
    try:
        if ending == "last message":
            text = tokenizer.render_begun(messages, tools=tools, variables=wanted)
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.chat(messages, ending == "answer", tools=tools, variables=wanted)
    except ValueError as error:
        raise invalid(str(error), "messages") from None
    return _checked(model, ids, "messages")


def _with_reasoning(message: Mapping[str, Any], template: str) -> Mapping[str, Any]:
    """Return a message with its reasoning under the template's name for it."""
    if FIELDS[0] not in message:
        return message
    rest = {name: value for name, value in message.items() if name != FIELDS[0]}
    return rest | {name: message[FIELDS[0]] for name in FIELDS if name in template}


def max_answer_tokens(model: Model, prompt: Sequence[int], asked: int | None, param: str) -> int:
    """Return the token limit of the answer.

    It is the requested limit, or else the rest of the context. Raises ApiError 400 with both numbers if
    prompt and answer do not fit.
    """
    left = model.max_context - len(prompt)
    if left < 1 or (asked or 0) > left:
        raise ContextOverflow(len(prompt), asked or None, model.max_context, param)
    return left if asked is None else asked


def decode(model: Model, ids: Sequence[int], param: str) -> str:
    """Return the text of ids; ApiError 400 for ids outside the vocabulary."""
    check_ids(model, ids, param)
    return model.tokenizer.decode(ids)


def check_ids(model: Model, ids: Sequence[int], param: str) -> None:
    """Raise ApiError 400 for ids outside the vocabulary."""
    wrong = next((i for i in ids if not 0 <= i < model.vocab_size), None)
    if wrong is not None:
        raise invalid(f"{param}: token id {str(wrong)[:20]} is outside the vocabulary of {model.vocab_size}", param)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return one token's text, special tokens and leading space included."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    piece = tokenizer.backend.id_to_token(token) or ""
    return f" {text}" if piece.startswith("\u2581") and not text.startswith(" ") else text


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    """Return one token's bytes, possibly part of a character, or None."""
    text = token_text(tokenizer, token)
    if "\ufffd" not in text:
        return list(text.encode())
    piece = tokenizer.backend.id_to_token(token) or ""
    byte = _BYTE_TOKEN.fullmatch(piece)
    if byte:
        return [int(byte[1], 16)]
    known = _byte_of()
    return [known[c] for c in piece] if all(c in known for c in piece) else None


class TokenTexts:
    """Incremental decoder: an incomplete character belongs to the completing token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)

    def push(self, ids: Sequence[int], *, last: bool) -> list[str]:
        """Return the text of each token; `last` flushes incomplete characters."""
        texts = [self._stream.push([token]) for token in ids]
        if last and texts:
            texts[-1] += self._stream.finish()
        return texts


@cache
def _byte_of() -> dict[str, int]:
    """Return the byte for a character of a byte-level vocabulary (GPT-2).

    Bytes that cannot be printed are shifted beyond 255, in order.
    """
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in set(printed)]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(moved)}


def _checked(model: Model, ids: list[int], param: str) -> list[int]:
    if not ids:
        raise invalid(f"{param} has no tokens; give at least one", param)
    check_ids(model, ids, param)
    return ids
