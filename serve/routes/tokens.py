"""Token ids, texts and bytes of prompts and answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from serve.engine_thread import ServedModel
from serve.errors import ContextOverflow, invalid
from serve.messages import Function
from serve.parsing.tool_format import FORMATS, HARMONY
from serve.schemas import ChatBody, TokenizeBody
from sharesd.models import chat_prompt
from sharesd.models.chat_prompt import Ending
from sharesd.models.text_stream import TextStream
from sharesd.models.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def ending_of(body: ChatBody | TokenizeBody) -> Ending:
    """Return the end of a request's prompt; ApiError 400 for two."""
    if not body.continue_final_message:
        return "turn" if body.add_generation_prompt is False else "answer"
    if body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other; leave one out"
        raise invalid(message, "continue_final_message")
    return "last message"


def encode(model: ServedModel, prompt: str | Sequence[int], add_special_tokens: bool = True) -> list[int]:
    """Return a prompt's ids; raises ApiError 400 for an invalid prompt."""
    ids = model.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else list(prompt)
    return _checked(model, ids, "prompt")


def encode_chat(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    functions: Sequence[Function] = (),
    ending: Ending = "answer",
    variables: Mapping[str, Any] | None = None,
    preferences: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the ids of a conversation, as `chat_prompt.encode_chat` does.

    Raises ApiError 400 if it refuses, or if the format of calls is unknown.
    """
    if functions and model.tokenizer.takes_tools and model.tool_format is None:
        message = "tools are given, but this model's chat template does not show the format of calls; leave them out"
        raise invalid(f"{message}, or start with --tool-format {'|'.join(FORMATS)}", "tools")
    if model.tool_format is HARMONY and any(len(each.get("tool_calls") or ()) > 1 for each in messages):
        message = "a message has several tool calls, of which this model's chat template shows the first; send one each"
        raise invalid(message, "messages")
    tools = [function.for_template() for function in functions]
    given: Any = {"tools": tools, "ending": ending, "variables": variables, "preferences": preferences}
    try:
        ids = chat_prompt.encode_chat(model.tokenizer, messages, **given)
    except chat_prompt.ChatError as error:
        raise invalid(str(error), error.param) from None
    return _checked(model, ids, "messages")


def max_answer_tokens(model: ServedModel, prompt: Sequence[int], asked: int | None, param: str) -> int:
    """Return the token limit of the answer.

    It is the requested limit, or else the rest of the context. Raises ApiError 400 with both numbers if
    prompt and answer do not fit.
    """
    left = model.max_context - len(prompt)
    if left < 1 or (asked or 0) > left:
        raise ContextOverflow(len(prompt), asked or None, model.max_context, param)
    return left if asked is None else asked


def decode(model: ServedModel, ids: Sequence[int], param: str) -> str:
    """Return the text of ids; ApiError 400 for ids outside the vocabulary."""
    check_ids(model, ids, param)
    return model.tokenizer.decode(ids)


def check_ids(model: ServedModel, ids: Sequence[int], param: str) -> None:
    """Raise ApiError 400 for ids outside the vocabulary."""
    wrong = next((i for i in ids if not 0 <= i < model.vocab_size), None)
    if wrong is not None:
        raise invalid(f"{param}: token id {str(wrong)[:20]} is outside the vocabulary of {model.vocab_size}", param)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return one token's text, special tokens and leading space included."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    piece = tokenizer.token(token) or ""
    return f" {text}" if piece.startswith("\u2581") and not text.startswith(" ") else text


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    """Return one token's bytes, possibly part of a character, or None."""
    text = token_text(tokenizer, token)
    if "\ufffd" not in text:
        return list(text.encode())
    piece = tokenizer.token(token) or ""
    byte = _BYTE_TOKEN.fullmatch(piece)
    if byte:
        return [int(byte[1], 16)]
    known = _byte_of()
    return [known[c] for c in piece] if all(c in known for c in piece) else None


class TokenTexts:
    """Incremental decoder: a character belongs to the token that completes it."""

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
    return {chr(byte): byte for byte in printed} | {chr(256 + index): byte for index, byte in enumerate(moved)}


def _checked(model: ServedModel, ids: list[int], param: str) -> list[int]:
    if not ids:
        raise invalid(f"{param} has no tokens; give at least one", param)
    check_ids(model, ids, param)
    return ids
