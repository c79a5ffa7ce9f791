"""Conversations that an LLM answers together, up to one for each row of the cache: files of prompts, training data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from sharesd.data.request_errors import RequestError
    from sharesd.engine.outputs import TokenChunk
    from sharesd.llm import LLM
    from sharesd.sampling_params import SamplingParams


class Conversation(Protocol):
    """A conversation to run, and the sink of its answers."""

    def next_prompt(self, llm: LLM) -> tuple[list[int], SamplingParams, int]:
        """Return token ids, parameters and index, as for `Engine.add`; ValueError if there cannot be a prompt."""
        ...

    def take(self, chunk: TokenChunk) -> None:
        """Receive tokens of the answer."""
        ...

    @property
    def goes_on(self) -> bool:
        """True if there is another prompt, now that an answer has finished."""
        ...


_T = TypeVar("_T", bound=Conversation)


def run_conversations(
    llm: LLM, next_conversation: Callable[[bool], tuple[int, _T] | None]
) -> Iterator[tuple[int, _T, ValueError | RequestError | None]]:
    """Run conversations in the mode of the LLM; yield (number, conversation, error) as each finishes.

    `next_conversation(wait)` returns None if there is none at the moment or, with `wait`, if none is left. No more are
    asked for than the cache has rows. A rejected first prompt, or a RequestError of any answer, is yielded as error; a
    later rejected prompt ends the conversation. Prompts are labelled with the number of their conversation.
    """
    from sharesd.engine.call_queue import Call, CallPrompt  # late: importing torch takes seconds

    call, num_rows = Call(llm.mode), llm.runtime.cache.batch
    asked: dict[int, _T] = {}

    def ask(number: int, talk: _T) -> None:
        llm.calls.add(call, CallPrompt(*talk.next_prompt(llm), label={"index": number}))
        asked[number] = talk

    chunks = llm.calls.run(call)
    try:
        while True:
            if not call.chunks:  # prompts that follow answers come first: their rows have what was said
                while len(asked) < num_rows and (numbered := next_conversation(not asked)) is not None:
                    try:
                        ask(*numbered)
                    except ValueError as reason:
                        yield *numbered, reason
                call.has_more = len(asked) == num_rows
            if not asked:
                return
            chunk = next(chunks)
            number = chunk.request.label["index"]
            talk = asked[number]
            if chunk.error is not None:
                del asked[number]
                yield number, talk, chunk.error
                continue
            talk.take(chunk)
            if chunk.finish_reason is not None:
                del asked[number]
                try:
                    if talk.goes_on:
                        ask(number, talk)
                except ValueError:
                    pass
                if number not in asked:
                    yield number, talk, None
    finally:
        call.closed = True  # also if it has not begun
