"""Conversations in which the target gives every answer: what is asked next, and what is kept of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sharesd.config import SamplingParams
from sharesd.data.prompt_files import Message
from train.data.loss_mask import Turn, join

if TYPE_CHECKING:
    from sharesd.engine.engine import Engine
    from sharesd.engine.outputs import TokenChunk
    from sharesd.engine.request import Request


class Unfit(ValueError):
    """A conversation that cannot be had; its text is a reason that can be counted."""


def questions_of(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """The system's messages, and the user's, which are asked one after the other. Unfit where there are none."""
    asked = [message for message in messages if message["role"] == "user"]
    if not asked or any(not message["content"].strip() for message in asked):
        raise Unfit("a user's message is missing or empty")
    first = messages.index(asked[0])
    if any(message["role"] == "system" for message in messages[first:]):
        raise Unfit("a system message in the midst of the conversation")
    return [message for message in messages[:first] if message["role"] == "system"], asked


@dataclass(eq=False)
class Dialogue:
    """A conversation on its way."""

    index: int
    """Number of its record in the input."""
    sample: int
    """Which of the record's answers this is."""
    source: str
    """Where the record stands."""
    messages: list[Message]
    """What has been said."""
    to_ask: list[Message]
    params: SamplingParams
    turns: list[Turn] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    _text: str = ""
    _ids: list[int] = field(default_factory=list)

    def ask(self, engine: Engine) -> Request:
        """Put the next question to the engine; Unfit where the chat template does not take it or it leaves no room."""
        if engine.tokenizer.has_chat_template:
            messages = [*self.messages, self.to_ask[0]]
            try:
                ids = engine.tokenizer.chat(messages)
            except ValueError as error:
                raise Unfit(str(error)) from error
        elif self.messages:
            raise Unfit("a checkpoint without chat template takes one question and no system message")
        else:
            ids = engine.tokenizer.encode(self.to_ask[0]["content"])
        if len(ids) + self.params.max_new_tokens > engine.max_context:
            raise Unfit("too long for the context")
        request = engine.add(ids, self.params)
        self.messages, self.to_ask = [*self.messages, self.to_ask[0]], self.to_ask[1:]
        return request

    def take(self, chunk: TokenChunk) -> None:
        """Tokens of the answer."""
        self._ids += chunk.token_ids
        self._text += chunk.text
        if chunk.finish_reason is not None:
            self.turns.append(Turn(chunk.request.prompt_ids, self._ids))
            self.finish_reasons.append(chunk.finish_reason)
            self.messages = [*self.messages, {"role": "assistant", "content": self._text}]
            self._ids, self._text = [], ""

    @property
    def goes_on(self) -> bool:
        """Whether there is more to ask. After an answer that was cut short there is not: nobody said its end."""
        return bool(self.to_ask) and self.finish_reasons[-1] == "stop"

    def record(self) -> dict[str, Any]:
        """What is kept of it."""
        return {
            "index": self.index,
            "sample": self.sample,
            "source": self.source,
            "messages": self.messages,
            "unasked": len(self.to_ask),
            "finish_reasons": self.finish_reasons,
            "sampling": {"temperature": self.params.temperature, "top_p": self.params.top_p, "seed": self.params.seed},
            "sequences": [example._asdict() for example in join(self.turns)],
        }


def seed_of(seed: int, index: int, sample: int) -> int:
    """A seed of its own for every answer, whoever gives it and when."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index} {sample}".encode()).digest()[:8]) >> 1
