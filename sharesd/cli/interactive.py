"""Interactive decoding, which Ctrl-C stops."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from types import FrameType

from compile.start_times import START
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import Completion, TokenChunk
from sharesd.sampling_params import SamplingParams


def answer(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    show: Callable[[TokenChunk], None],
    *,
    reuse: bool = False,
    answers: list[Completion] | None = None,
) -> list[Completion]:
    """Decode prompts together; Ctrl-C ends unfinished answers with `finish_reason` None.

    Chunks go to `answers`, if given. Raises the first RequestError after the last chunk, if prompts failed.
    """
    answers = [Completion() for _ in prompts] if answers is None else answers
    chunks = engine.stream(prompts, params, reuse=reuse)
    with suppress(KeyboardInterrupt), ctrl_c_noted() as stopped, closing(chunks):  # type: ignore[type-var]
        for chunk in chunks:
            START.end("first token")
            answers[chunk.row].add(chunk)
            show(chunk)
            if stopped():
                break
    return answers


@contextmanager
def ctrl_c_noted() -> Iterator[Callable[[], bool]]:
    """Yield a check for Ctrl-C, whose second press raises KeyboardInterrupt."""
    noted = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)
