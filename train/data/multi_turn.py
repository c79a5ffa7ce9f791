"""Multi-turn conversations in which the target gives every answer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sharesd.data.prompt_files import Message
from sharesd.sampling_params import SamplingParams
from train.data.loss_mask import Turn, join

if TYPE_CHECKING:
    from sharesd.engine.engine import Engine
    from sharesd.engine.outputs import TokenChunk
    from sharesd.engine.request import Request


class Unusable(ValueError):
    """A conversation that cannot be used; the text is the reason."""


def prompts_of(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Return system and user messages of a record; raise Unusable without any."""
    asked = [message for message in messages if message["role"] == "user"]
    if not asked or any(not message["content"].strip() for message in asked):
        raise Unusable("a user's message is missing or empty")
    first = messages.index(asked[0])
    if any(message["role"] == "system" for message in messages[first:]):
        raise Unusable("a system message in the midst of the conversation")
    return [message for message in messages[:first] if message["role"] == "system"], asked


@dataclass(eq=False)
class Conversation:
    """A conversation on its way."""

    index: int
    """Number of its record in the input."""
    sample: int
    """Index of the answer in its record."""
    source: str
    """Position of the record in the input."""
    messages: list[Message]
    """Messages so far."""
    questions_left: list[Message]
    params: SamplingParams
    turns: list[Turn] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    _text: str = ""
    _ids: list[int] = field(default_factory=list)

    def ask(self, engine: Engine) -> Request:
        """Add the next question to the engine and return its request.

        Raises Unusable if the chat template refuses it, or if no room is left for an answer.
        """
        if engine.tokenizer.has_chat_template:
            messages = [*self.messages, self.questions_left[0]]
            try:
                ids = engine.tokenizer.chat(messages)
            except ValueError as error:
                raise Unusable(str(error)) from error
        elif self.messages:
            raise Unusable("a checkpoint without chat template takes one question and no system message")
        else:
            ids = engine.tokenizer.encode(self.questions_left[0]["content"])
        if len(ids) + self.params.max_new_tokens > engine.max_context:
            raise Unusable("too long for the context")
        request = engine.add(ids, self.params)
        self.messages, self.questions_left = [*self.messages, self.questions_left[0]], self.questions_left[1:]
        return request

    def take(self, chunk: TokenChunk) -> None:
        """Append tokens of the answer."""
        self._ids += chunk.token_ids
        self._text += chunk.text
        if chunk.finish_reason is not None:
            self.turns.append(Turn(chunk.request.prompt_ids, self._ids))
            self.finish_reasons.append(chunk.finish_reason)
            self.messages = [*self.messages, {"role": "assistant", "content": self._text}]
            self._ids, self._text = [], ""

    @property
    def goes_on(self) -> bool:
        """True if another question follows; an answer cut short ends the conversation."""
        return bool(self.questions_left) and self.finish_reasons[-1] == "stop"

    def record(self) -> dict[str, Any]:
        """Record of the conversation, as written to disk."""
        return {
            "index": self.index,
            "sample": self.sample,
            "source": self.source,
            "messages": self.messages,
            "unasked": len(self.questions_left),
            "finish_reasons": self.finish_reasons,
            "sampling": {"temperature": self.params.temperature, "top_p": self.params.top_p, "seed": self.params.seed},
            "sequences": [example._asdict() for example in join(self.turns)],
        }


def seed_of(seed: int, index: int, sample: int) -> int:
    """Return the seed of one answer, independent of process and order."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index} {sample}".encode()).digest()[:8]) >> 1
