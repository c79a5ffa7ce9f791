"""Calls of several threads, which share the engines of a runtime: who waits for tokens steps the engine for all.

At any moment the calls of one mode are decoded. Those of another one wait until these have ended, in the order in which
they came; so does a call whose way of accepting drafts does not go with that of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from threading import Condition, Lock

from compile.adaptive_threads import CREW
from sharesd import sampling
from sharesd.config import Mode, SamplingParams
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import TokenChunk
from sharesd.engine.request import Request

PATIENCE = 1.0
"""Seconds until a thread that waits for another looks by itself: a second Ctrl-C may have swallowed the notice."""

_STEP = Lock()
"""Held by who steps, in all of the process: a step takes all cores, and adapts their number."""


class Call:
    """Prompts of one call, and what has come of them."""

    def __init__(self, mode: str, asked: Sequence[tuple[list[int], SamplingParams, int]], *, whole: bool) -> None:
        """`asked`: token ids, parameters and index of each prompt, as `Engine.add` takes them. `whole`: nothing is
        wanted before all has ended.
        """
        self.mode, self.asked, self.whole = mode, asked, whole
        self.matches = all(params.acceptance == "match" for _, params, _ in asked)
        """True if acceptance is `match`, so that rows may be sampled in different ways."""
        self.requests: list[Request] = []
        """Those that the engine has got, in order."""
        self.pieces: deque[TokenChunk] = deque()
        """Chunks that the caller has not got."""
        self.num_left = len(asked)
        """Prompts whose answers have not ended."""
        self.error: BaseException | None = None
        self.closed = False
        """True once the caller has closed its iterator."""

    @property
    def ready(self) -> bool:
        """True if there are pieces, an end or an error for the caller."""
        return self.error is not None or not self.num_left or (bool(self.pieces) and not self.whole)

    @property
    def num_asked(self) -> int:
        """Prompts that the engine has not got."""
        return len(self.asked) - len(self.requests)


class Calls:
    """Runs calls on engines that share a KV cache. All methods may be called from any thread."""

    def __init__(self, engines: Mapping[Mode, Engine]) -> None:
        """`engines`, by mode, are used in no other way from now on."""
        self._engines: dict[str, Engine] = {mode: engine for mode, engine in engines.items()}
        self._new: deque[Call] = deque()  # in the order in which they came
        self._running: deque[Call] = deque()  # all of one mode; the next one whose prompt gets a row comes first
        self._owners: dict[Request, Call] = {}
        self._changed = Condition()
        self._leader: Call | None = None  # whose thread steps
        self._closed: BaseException | None = None

    def run(self, call: Call) -> Generator[TokenChunk, None, None]:
        """Chunks of a call as they come. Closing the iterator cancels what is left of it before the next step.

        Raises what `Engine.add` raises, before any work; RuntimeError where another call has ended in the middle of a
        step.
        """
        with self._changed:
            self._new.append(call)
        try:
            while call.num_left or call.pieces:
                if not call.pieces or call.whole:
                    self._wait(call)
                while call.pieces:
                    yield call.pieces.popleft()
        finally:
            call.closed = True  # no more: this may run anywhere, where an iterator is collected

    def close(self, reason: BaseException) -> None:
        """End all calls, with this reason, and let go of the engines, once no step runs. Later calls raise it too."""
        self._closed = self._closed or reason
        with self._changed:
            while self._leader is not None:
                self._changed.wait(PATIENCE)
            for call in (*self._running, *self._new):
                call.error = call.error or reason
            for calls in (self._owners, self._running, self._new, self._engines):
                calls.clear()
            self._changed.notify_all()

    def _wait(self, call: Call) -> None:
        """Until there is something for the caller, whose thread steps if no other does."""
        try:
            with self._changed:
                while self._leader is not None and not call.ready:
                    self._changed.wait(PATIENCE)
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
        """A step for all that run; those who wait look at what has come of it."""
        try:
            with _STEP:
                CREW.enter()
                self._drop_ended()
                self._admit()
                if self._running:
                    engine = self._engines[self._running[0].mode]
                    self._fill_rows(engine)
                    for chunk in engine.step():
                        self._hand_out(chunk)
        except BaseException as error:
            self._break_off(leader, error)
            raise
        finally:
            with self._changed:
                self._changed.notify_all()

    def _drop_ended(self) -> None:
        """Cancel what nobody wants any more."""
        for call in [call for call in self._running if call.closed or not call.num_left]:
            for request in call.requests:
                if self._owners.pop(request, None) is not None:
                    self._engines[call.mode].cancel(request)
            self._running.remove(call)

    def _admit(self) -> None:
        """Let calls run that can be decoded with those that do, up to the first that cannot."""
        while self._new and (self._new[0].closed or self._goes_along(self._new[0])):
            call = self._new.popleft()
            if call.closed:
                continue
            try:
                sampling.check_alike([params for _, params, _ in call.asked])
                for ids, params, _ in call.asked:
                    self._engines[call.mode].check(ids, params)
            except ValueError as error:
                call.error = error
            else:
                self._running.append(call)

    def _goes_along(self, call: Call) -> bool:
        if not self._running:
            return True
        first = self._running[0]
        if call.mode != first.mode or call.matches != first.matches:
            return False
        try:
            sampling.check_alike([each.asked[0][1] for each in (first, call) if not each.matches])
        except ValueError:
            return False
        return True

    def _fill_rows(self, engine: Engine) -> None:
        """Give free rows to prompts of the calls in turn: a long list holds up nobody else's prompt."""
        num_free = engine.cache.batch - engine.num_running - engine.num_waiting
        for _ in range(min(num_free, sum(call.num_asked for call in self._running))):
            while not self._running[0].num_asked:
                self._running.rotate(-1)
            call = self._running[0]
            request = engine.add(*call.asked[len(call.requests)])
            self._owners[request] = call
            call.requests.append(request)
            self._running.rotate(-1)

    def _hand_out(self, chunk: TokenChunk) -> None:
        call = self._owners[chunk.request]
        call.pieces.append(chunk)
        if chunk.finish_reason is not None:
            del self._owners[chunk.request]
            call.num_left -= 1

    def _break_off(self, leader: Call, error: BaseException) -> None:
        """All that runs ends here: the device may be ahead of what was handed out."""
        for call in self._running:
            if call is not leader:
                call.error = RuntimeError(f"another call was broken off in the middle of a step ({error!r}); ask again")
        self._running.clear()
        self._owners.clear()
        for engine in self._engines.values():
            engine.cancel_all()
