"""Encoding of user prompts as token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sharesd.data.prompt_files import Message

if TYPE_CHECKING:
    from sharesd.models.tokenizer import Tokenizer


def encode(tokenizer: Tokenizer, prompt: str | list[Message], *, raw: bool, system: str | None) -> list[int]:
    """Return token ids, through the chat template unless `raw` is set.

    `system` yields to a conversation's own system prompt. ValueError if a conversation or `system` lacks a template.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(prompt, str) and (raw or not tokenizer.has_chat_template):
        if system is not None:
            raise ValueError(
                "this checkpoint has no chat template, and so no place for --system; put it into the prompt"
            )
        return tokenizer.encode(prompt)
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return tokenizer.chat(messages)
