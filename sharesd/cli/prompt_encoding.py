"""How a prompt of a user becomes token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sharesd.data.prompt_files import Message

if TYPE_CHECKING:
    from sharesd.models.tokenizer import Tokenizer


def encode(tokenizer: Tokenizer, prompt: str | list[Message], *, raw: bool, system: str | None) -> list[int]:
    """A text is put through the chat template where there is one, unless `raw`; so is a conversation, always.

    `system` goes before what has no system message of its own. ValueError where there is no place for it, or for a
    conversation.
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
