"""Thread that runs the engine and emits its events."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from serve.choice_state import Choice
from serve.parsing.reasoning import Reasoning
from serve.parsing.tool_format import ToolFormat
from sharesd.models.tokenizer import Tokenizer

if TYPE_CHECKING:  # they need torch, which the server's start does not wait for
    from sharesd.engine.engine import Engine
    from sharesd.engine.outputs import TokenChunk
    from sharesd.engine.request import Request
    from sharesd.sampling.constraints import Grammars


IDLE_S = 0.5
"""Seconds without a command before a text is saved."""


@dataclass(frozen=True)
class ServedModel:
    """Loaded model."""

    engine: Engine
    tokenizer: Tokenizer
    max_context: int
    """Maximum tokens of prompt and answer together."""
    vocab_size: int
    grammars: Grammars
    tool_format: ToolFormat | None = None
    """Format of the model's tool calls; None if unknown."""
    reasoning: Reasoning | None = None
    """Marks of reasoning that is kept apart from the content, or None."""
    kernels: str = "cpu"
    """`streams`, `triton` or `torch` on a GPU (see `EngineConfig.kernels`)."""
    kv_bytes: int = 0
    """Bytes of the cache's keys and values, of all rows."""
    state_bytes: int = 0
    """Bytes that recurrent layers keep of all rows; without copies of earlier states."""
    num_rows: int | None = None
    """Answers decoded in one batch; None: as many as the settings say."""


@dataclass(frozen=True)
class Ready:
    """Event: the model is loaded."""

    model: ServedModel


@dataclass(frozen=True)
class Added:
    """Event after `EngineThread.add`: choices are queued, or refused with `error`."""

    choices: list[Choice]
    error: ValueError | None = None


class Output(NamedTuple):
    """Tokens of one round for one choice."""

    choice: Choice
    chunk: TokenChunk
    num_drafted: int
    """Number of draft tokens verified in the round."""
    admitted: float
    """Start of the step that assigned a batch row (time.monotonic)."""


@dataclass(frozen=True)
class RoundEvent:
    """Event: a step of the engine has ended."""

    outputs: list[Output]
    num_running: int
    num_waiting: int


@dataclass(frozen=True)
class FailedEvent:
    """Event: loading or decoding failed and the thread has ended."""

    error: BaseException


@dataclass
class _Running:
    """State of a choice that the engine has."""

    choice: Choice
    admitted: float | None = None
    """Start of the step that assigned a batch row."""
    begun: bool = False
    """True after the first tokens."""
    num_drafted: int = 0
    """Draft tokens of the rounds emitted so far."""


Event = Ready | Added | RoundEvent | FailedEvent


class EngineThread:
    """Thread that runs the model of `load` and emits events by `emit`.

    All methods may be called from any thread.
    """

    def __init__(self, load: Callable[[], ServedModel], emit: Callable[[Event], None]) -> None:
        self._load, self._emit = load, emit
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._requests: dict[Choice, Request] = {}
        self._states: dict[int, _Running] = {}  # by the identity of the engine's request
        self._stopped = self._has_unsaved = False
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, which loads the model, then decodes."""
        self._thread.start()

    def add(self, choices: Sequence[Choice]) -> None:
        """Queue all choices or none; an `Added` event follows."""
        self._inbox.put(partial(self._add, list(choices)))

    def cancel(self, choices: Sequence[Choice]) -> None:
        """Cancel choices before the next round; chunks of earlier rounds may follow."""
        self._inbox.put(partial(self._cancel, list(choices)))

    def stop(self, timeout: float) -> bool:
        """Stop the thread after its current step; return False after `timeout` seconds."""
        self._inbox.put(self._stop)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def seconds_in_step(self) -> float:
        """Return the seconds since the current step began; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def _run(self) -> None:
        try:
            model = self._load()
            self._engine = model.engine
            self._emit(Ready(model))
            while not self._stopped:
                self._read_inbox()
                if self._requests:
                    self._step()
            while self._engine.save_text():
                pass
        except BaseException as error:
            self._emit(FailedEvent(error))

    def _read_inbox(self) -> None:
        """Run queued commands; block until the next if no request is active.

        After IDLE_S without any, texts are saved to the prompt cache, one after another.
        """
        wait = not self._requests
        while True:
            try:
                self._inbox.get(block=wait, timeout=IDLE_S if self._has_unsaved else None)()
            except queue.Empty:
                if not wait:
                    return
                self._has_unsaved = self._engine.save_text()
            else:
                wait = False

    def _step(self) -> None:
        self._step_began = began = time.monotonic()
        chunks = self._engine.step()
        self._step_began, self._has_unsaved = None, True
        for request in self._requests.values():
            running = self._states[id(request)]
            if running.admitted is None and request.num_read:
                running.admitted = began
        outputs = [self._output(chunk) for chunk in chunks]
        for output in outputs:
            if output.chunk.finish_reason is not None:
                self._forget(output.choice)
        self._emit(RoundEvent(outputs, self._engine.num_running, self._engine.num_waiting))

    def _output(self, chunk: TokenChunk) -> Output:
        running = self._states[id(chunk.request)]
        assert running.admitted is not None
        if not running.begun:  # these come from the prefill, though stats may already count drafts of the same step
            running.begun = True
            return Output(running.choice, chunk, 0, running.admitted)
        before, running.num_drafted = running.num_drafted, chunk.request.stats.drafted_tokens
        return Output(running.choice, chunk, running.num_drafted - before, running.admitted)

    def _add(self, choices: list[Choice]) -> None:
        try:
            for choice in choices:
                request = self._engine.add(choice.prompt, choice.params, choice.index)
                request.label, request.wants_rounds = {"id": choice.request_id}, choice.wants_rounds
                self._requests[choice], self._states[id(request)] = request, _Running(choice)
        except ValueError as error:
            self._cancel(choices)
            self._emit(Added(choices, error))
        else:
            self._emit(Added(choices))

    def _cancel(self, choices: list[Choice]) -> None:
        for choice in choices:
            if choice in self._requests:
                self._engine.cancel(self._requests[choice])
                self._forget(choice)
        self._emit(RoundEvent([], self._engine.num_running, self._engine.num_waiting))

    def _forget(self, choice: Choice) -> None:
        del self._states[id(self._requests.pop(choice))]

    def _stop(self) -> None:
        self._stopped = True
