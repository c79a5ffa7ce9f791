"""The loop over an engine's steps, which calls of several threads share.

`LLM.generate` and `LLM.stream` tokenize their prompts, wrap them in a `Call`, and collect what `CallQueue.run` yields.
The engine has no thread of its own: one waiting caller steps it for all. Calls of other modes or acceptance rules wait
in order of arrival. Files of prompts and conversations add to a call while it runs; warm-ups and benchmarks of engines
without an `LLM` use `decode`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition, Lock
from typing import Any

from compile.adaptive_threads import STEP_THREADS
from sharesd import sampling
from sharesd.data.request_errors import NonFiniteLogits
from sharesd.engine.engine import Engine, Prompt
from sharesd.engine.outputs import TokenChunk
from sharesd.engine.request import Caller, Request
from sharesd.sampling_params import SamplingParams

POLL_SECONDS = 1.0
"""Seconds between a waiting thread's checks: Ctrl-C can make it miss a notification."""

_STEP_LOCK = Lock()
"""Serialises the steps of all engines in the process: each uses all cores, and tunes the number of threads."""


@dataclass(frozen=True, slots=True)
class CallPrompt:
    """A prompt of a call; `index` and `label` as in `Request`."""

    ids: list[int]
    params: SamplingParams
    index: int = 0
    label: Mapping[str, Any] | None = None
    """None: the engine's."""


class Call(Caller):
    """Prompts of one call and the chunks of their answers."""

    def __init__(
        self, mode: str, prompts: Iterable[CallPrompt] = (), *, collected_at_end: bool = False, reuse: bool = True
    ) -> None:
        """`CallQueue.add` appends further prompts.

        Args:
            mode: mode of all prompts.
            prompts: the first prompts.
            collected_at_end: chunks are delivered once all prompts are done, as for `LLM.generate`.
            reuse: as in `Engine.add`.
        """
        self.mode, self.collected_at_end, self.reuse = mode, collected_at_end, reuse
        self.queued = deque(prompts)
        """Prompts that the engine does not have yet."""
        self.rule = self.queued[0].params if self.queued else SamplingParams()
        """Parameters that those of all prompts can be decoded together with."""
        self.chunks: deque[TokenChunk] = deque()
        """Chunks that have not been delivered."""
        self.failure: NonFiniteLogits | None = None
        """Error of the first prompt whose logits are not numbers.

        It is raised after the answers of the others. Other errors of requests are only in their chunks.
        """
        self.error: BaseException | None = None
        self.closed = False
        # The caller changes the first, and whoever steps changes the second.
        self.num_added, self.num_finished = len(self.queued), 0

    @property
    def num_unfinished(self) -> int:
        """Prompts whose answers have not finished."""
        return self.num_added - self.num_finished

    @property
    def ready(self) -> bool:
        """Chunks, an end or an error are ready for the caller."""
        return self.error is not None or not self.num_unfinished or (bool(self.chunks) and not self.collected_at_end)

    @property
    def uses_match(self) -> bool:
        """True if prompts use the rule `match`; only then may rows differ in how they are sampled."""
        return self.rule.acceptance == "match"


class CallQueue:
    """Queue of calls on an engine. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        """Take over an engine, which others must not step while calls run."""
        self._engine: Engine | None = engine
        self._new: deque[Call] = deque()  # in the order in which they came
        self._running: deque[Call] = deque()  # all of one mode; the next one whose prompt gets a row comes first
        self._owners: dict[Request, Call] = {}
        self._changed = Condition()
        self._leader: Call | None = None  # whose thread steps
        self._closed: BaseException | None = None

    def run(self, call: Call) -> Generator[TokenChunk, None, None]:
        """Yield chunks of a call; closing the iterator cancels the rest.

        Raises the errors of `Engine.add` before any of its prompts is read; RuntimeError if another call failed in the
        middle of a step; NonFiniteLogits after the last chunk if a prompt's logits are not numbers.
        """
        self._enter(call)
        try:
            while call.num_unfinished or call.chunks:
                if not call.chunks or call.collected_at_end:
                    self._wait(call)
                while call.chunks:
                    yield call.chunks.popleft()
            if call.failure is not None:
                raise call.failure
        finally:
            call.closed = True  # only a flag: garbage collection may run this block in any thread

    def add(self, call: Call, prompt: CallPrompt) -> None:
        """Append a prompt to a call, before it runs or between two of its chunks; ValueError if it is rejected."""
        with _STEP_LOCK, self._changed:  # no step admits or drops the call meanwhile
            if self._engine is not None:  # else `run` raises why
                self._engine.check(prompt.ids, prompt.params, call.mode)
            if not call.num_added:
                call.rule = prompt.params
            sampling.check_alike([call.rule, prompt.params])
            call.queued.append(prompt)
            call.num_added += 1
            self._enter(call)

    def drop_closed(self) -> None:
        """Free the rows of closed calls, which otherwise the next step does; not while a step runs."""
        with self._changed:  # a leader is chosen under this lock, so no step begins
            if self._leader is None and self._engine is not None:
                self._drop_finished(self._engine)

    def close(self, reason: BaseException) -> None:
        """End all calls with this error, after a running step."""
        self._closed = self._closed or reason
        with self._changed:
            while self._leader is not None:
                self._changed.wait(POLL_SECONDS)
            for call in (*self._running, *self._new):
                call.error = call.error or reason
            for calls in (self._owners, self._running, self._new):
                calls.clear()
            self._engine = None
            self._changed.notify_all()

    def _enter(self, call: Call) -> None:
        """Append the call to those that wait, unless it waits or runs."""
        with self._changed:
            if call not in self._running and call not in self._new:
                self._new.append(call)

    def _wait(self, call: Call) -> None:
        """Step the engine, unless another thread does, until output arrives."""
        try:
            with self._changed:
                while self._leader is not None and not call.ready:
                    self._changed.wait(POLL_SECONDS)
                if not call.ready:
                    self._leader = call
            while not call.ready:
                if self._closed is not None:
                    raise self._closed
                self._step(call)
        finally:
            if self._leader is call:
                self._leader = None
                with self._changed:
                    self._changed.notify_all()
        if call.error is not None:
            raise call.error

    def _step(self, leader: Call) -> None:
        """Run a step for all running calls and notify waiting threads."""
        try:
            with _STEP_LOCK:
                STEP_THREADS.enter()
                engine = self._engine
                assert engine is not None  # `close` waits for a running step
                self._drop_finished(engine)
                self._admit(engine)
                if self._running:
                    self._fill_rows(engine)
                    for chunk in engine.step():
                        self._deliver(chunk)
        except BaseException as error:
            self._fail_all(leader, error)
            raise
        finally:
            with self._changed:
                self._changed.notify_all()

    def _drop_finished(self, engine: Engine) -> None:
        with self._changed:
            dropped = [call for call in self._running if call.closed or not call.num_unfinished]
            for call in dropped:
                self._running.remove(call)
        for request in [request for request, call in self._owners.items() if call in dropped]:
            del self._owners[request]
            engine.cancel(request)

    def _admit(self, engine: Engine) -> None:
        """Start waiting calls up to the first incompatible with the running ones."""
        while self._new and (self._new[0].closed or self._is_compatible(self._new[0])):
            call = self._new.popleft()
            if call.closed:
                continue
            try:
                sampling.check_alike([call.rule, *(prompt.params for prompt in call.queued)])
                for prompt in call.queued:
                    engine.check(prompt.ids, prompt.params, call.mode)
            except ValueError as error:
                call.error = error
            else:
                self._running.append(call)

    def _is_compatible(self, call: Call) -> bool:
        if not self._running:
            return True
        first = self._running[0]
        if call.mode != first.mode or call.uses_match != first.uses_match:
            return False
        try:
            sampling.check_alike([each.rule for each in (first, call) if not each.uses_match])
        except ValueError:
            return False
        return True

    def _fill_rows(self, engine: Engine) -> None:
        """Give free rows to prompts of the calls in turn; one prompt more waits, so that the engine knows of them."""
        num_free = engine.cache.batch + 1 - engine.num_running - engine.num_waiting
        for _ in range(min(num_free, sum(len(call.queued) for call in self._running))):
            while not self._running[0].queued:
                self._running.rotate(-1)
            call = self._running[0]
            prompt = call.queued.popleft()
            request = engine.add(prompt.ids, prompt.params, prompt.index, mode=call.mode, reuse=call.reuse, call=call)
            if prompt.label is not None:
                request.label = prompt.label
            self._owners[request] = call
            self._running.rotate(-1)

    def _deliver(self, chunk: TokenChunk) -> None:
        call = self._owners[chunk.request]
        call.chunks.append(chunk)
        if isinstance(chunk.error, NonFiniteLogits):
            call.failure = call.failure or chunk.error
        if chunk.finish_reason is not None:
            del self._owners[chunk.request]
            call.num_finished += 1

    def _fail_all(self, leader: Call, error: BaseException) -> None:
        """End all running calls: the device may be ahead of delivered tokens."""
        for call in self._running:
            if call is not leader:
                call.error = RuntimeError(f"another call failed in the middle of a step ({error!r}); repeat this one")
        self._running.clear()
        self._owners.clear()
        if self._engine is not None:
            self._engine.cancel_all()


def decode(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    mode: str | None = None,
    reuse: bool = False,
) -> Generator[TokenChunk, None, None]:
    """Yield chunks of prompts on an engine that nobody else steps; `reuse`: as in `Engine.add`."""
    calls, name = CallQueue(engine), engine.of_mode(mode).name
    asked = [CallPrompt(engine.check(prompt, params, name), params, index) for index, prompt in enumerate(prompts)]
    try:
        yield from calls.run(Call(name, asked, reuse=reuse))
    finally:
        calls.drop_closed()
