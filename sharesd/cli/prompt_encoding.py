"""Encoding of user prompts as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sharesd.data.chat_messages import for_template

if TYPE_CHECKING:
    from sharesd.models.tokenizer import Tokenizer


def encode(
    tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, Any]], *, raw: bool, system: str | None
) -> list[int]:
    """Return token ids, through the chat template unless `raw` is set.

    `system` yields to a conversation's own system prompt. ValueError if a conversation or `system` lacks a template.
    """
    from sharesd.models.chat_prompt import encode_chat  # its packages take a while, mistakes should not

    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(prompt, str) and (raw or not tokenizer.has_chat_template):
        if system is not None:
            raise ValueError(
                "this checkpoint has no chat template, and so no place for --system; put it into the prompt"
            )
        return tokenizer.encode(prompt)
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return encode_chat(tokenizer, for_template(messages))
