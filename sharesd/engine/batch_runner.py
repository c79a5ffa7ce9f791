"""Conversations had together, as many as the cache has rows: whoever ends makes room for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from sharesd.engine.engine import Engine
    from sharesd.engine.outputs import TokenChunk
    from sharesd.engine.request import Request

CHUNK = 512
"""Tokens of a prompt that are read at a time: nobody waits for the others' next tokens. With small pieces, as a server
reads them, eight conversations at once, of 64 new tokens, took a sixth more processor time."""


class Talk(Protocol):
    """What is asked, and what comes of it."""

    def ask(self, engine: Engine) -> Request:
        """Put the next question to the engine; ValueError where it cannot be asked."""
        ...

    def take(self, chunk: TokenChunk) -> None:
        """Tokens of the answer."""
        ...

    @property
    def goes_on(self) -> bool:
        """Whether there is more to ask, now that an answer has ended."""
        ...


_T = TypeVar("_T", bound=Talk)


def converse(
    engine: Engine, take: Callable[[bool], tuple[int, _T] | None]
) -> Iterator[tuple[int, _T, ValueError | None]]:
    """Have the talks that `take` gives, and yield each, with its number, when it has ended.

    `take(wait)`: the next one; None where there is none at the moment, or, with `wait`, none any more. A talk whose
    first question cannot be asked comes with the reason; where a later one cannot, it ends there.
    """
    asked: dict[Request, tuple[int, _T]] = {}
    while True:
        while len(asked) < engine.cache.batch and (numbered := take(not asked)) is not None:
            number, talk = numbered
            try:
                asked[talk.ask(engine)] = numbered
            except ValueError as reason:
                yield number, talk, reason
        if not asked:
            return
        for chunk in engine.step():
            number, talk = asked[chunk.request]
            talk.take(chunk)
            if chunk.finish_reason is not None:
                del asked[chunk.request]
                if not (talk.goes_on and _asked_again(engine, asked, number, talk)):
                    yield number, talk, None


def _asked_again(engine: Engine, asked: dict[Request, tuple[int, _T]], number: int, talk: _T) -> bool:
    try:
        asked[talk.ask(engine)] = number, talk
    except ValueError:
        return False
    return True
