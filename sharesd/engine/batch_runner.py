"""Runs multi-turn conversations together, up to one for each row of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from sharesd.data.request_errors import RequestError
    from sharesd.engine.engine import Engine
    from sharesd.engine.outputs import TokenChunk
    from sharesd.engine.request import Request


class Conversation(Protocol):
    """A conversation to run, and the sink of its answers."""

    def ask(self, engine: Engine) -> Request:
        """Add the next prompt to the engine; raise ValueError if rejected."""
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
    engine: Engine, next_conversation: Callable[[bool], tuple[int, _T] | None]
) -> Iterator[tuple[int, _T, ValueError | RequestError | None]]:
    """Run conversations together; yield (index, conversation, error) as each finishes.

    `next_conversation(wait)` returns None if there is none at the moment or, with `wait`, if none is left. A rejected
    first prompt, or a RequestError of any answer, is yielded as error; a later rejected prompt ends the conversation.
    """
    asked: dict[Request, tuple[int, _T]] = {}
    while True:
        while len(asked) < engine.cache.batch and (numbered := next_conversation(not asked)) is not None:
            number, talk = numbered
            try:
                asked[talk.ask(engine)] = numbered
            except ValueError as reason:
                yield number, talk, reason
        if not asked:
            return
        for chunk in engine.step():
            number, talk = asked[chunk.request]
            if chunk.error is not None:
                del asked[chunk.request]
                yield number, talk, chunk.error
                continue
            talk.take(chunk)
            if chunk.finish_reason is not None:
                del asked[chunk.request]
                if not (talk.goes_on and _ask_again(engine, asked, number, talk)):
                    yield number, talk, None


def _ask_again(engine: Engine, asked: dict[Request, tuple[int, _T]], number: int, talk: _T) -> bool:
    try:
        asked[talk.ask(engine)] = number, talk
    except ValueError:
        return False
    return True
