"""Async side of the engine: admission, queueing, delivery of outputs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from serve.choice_state import Choice
from serve.engine_thread import Added, EngineThread, Event, FailedEvent, Output, Ready, RoundEvent, ServedModel
from serve.errors import ApiError, engine_failed, invalid, of_request, unavailable
from serve.metrics import Metrics
from serve.parsing.grammar import marks_of
from serve.parsing.reasoning import reasoning_of
from serve.parsing.tool_format import format_of
from serve.server_config import ServerSettings

log = logging.getLogger(__name__)

MAX_STEP_SECONDS = 120.0
"""Maximum seconds of a step; a longer one counts as hanging."""


NO_TOKENS: Any = SimpleNamespace(
    request=None,
    token_ids=[],
    sources=[],
    drafters=[],
    text="",
    logprobs=None,
    top_logprobs=None,
    finish_reason="length",
    error=None,
    round=None,
)
"""Chunk of a choice with a limit of 0 tokens."""


class Service:
    """Admission and delivery on one event loop; loading starts immediately."""

    def __init__(self, settings: ServerSettings, load: Callable[[], ServedModel]) -> None:
        self.settings, self.metrics = settings, Metrics(settings.model_name, self._kv_use)
        self.model: ServedModel | None = None
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self.closing = False
        self.calls: set[ServerCall] = set()
        self.owners: dict[Choice, ServerCall] = {}
        """Choice in the engine -> its call."""
        self.num_places_used = 0
        """Queue places in use."""
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: no request is left
                loop.call_soon_threadsafe(self._on_event, event)

        self.engine = EngineThread(load, emit)
        self.engine.start()

    @property
    def unavailable_reason(self) -> str | None:
        """Reason for refusing requests, or None."""
        if self.failure is not None:
            return "the engine failed" if self.model else "the model could not be loaded"
        if self.closing:
            return "the server shuts down"
        if self.model is None:
            return "the model is being loaded"
        if self.engine.seconds_in_step > MAX_STEP_SECONDS:
            return f"the engine has not finished a step for {self.engine.seconds_in_step:.0f} s"
        return None

    def ready_model(self) -> ServedModel:
        """Return the model; raise ApiError 503 if it cannot serve."""
        unavailable_reason = self.unavailable_reason
        if unavailable_reason is not None or self.model is None:
            raise unavailable(f"{unavailable_reason}; try again later")
        return self.model

    def open(self, num_choices: int) -> ServerCall:
        """Reserve queue places for a request's choices; `Call.close` releases them.

        Raises ApiError: 503 if the server is not ready, 429 if the queue is full, 400 for more choices than places.
        """
        model = self.ready_model()
        settings = self.settings
        if num_choices > settings.num_places:
            self.metrics.rejected("too_many_choices")
            limits = f"--max-batch {settings.max_batch} and --max-queue {settings.max_queue}"
            raise invalid(f"the request has {num_choices} choices; {limits} hold {settings.num_places}", "n")
        if self.num_places_used + num_choices > settings.num_places:
            self.metrics.rejected("queue_full")
            raise ApiError(
                429,
                f"the queue is full: {self.num_places_used} of {settings.num_places} places are taken; try again later",
                code="queue_full",
                headers={"retry-after": "1"},
            )
        self.num_places_used += num_choices
        call = ServerCall(self, model, num_choices)
        self.calls.add(call)
        return call

    def on_disconnect(self) -> None:
        """Count a client that disconnected before the end of the answer."""
        self.metrics.disconnected()

    async def drain(self, timeout: float) -> None:
        """Refuse new requests; fail running requests after `timeout` seconds."""
        self.closing = True
        await self._wait_for_calls(timeout)
        for call in self.calls:
            call.fail(unavailable("the server shut down before the answer was complete"))
        await self._wait_for_calls(1.0)

    async def wait_after_failure(self) -> None:
        """Wait until running requests have sent their errors."""
        await self._wait_for_calls(2.0)

    def stop(self) -> bool:
        """Stop the engine's thread; return False after 5 s."""
        return self.engine.stop(5.0)

    async def _wait_for_calls(self, timeout: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        while self.calls and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    def _on_event(self, event: Event) -> None:
        match event:
            case Ready(model):
                self.model = _with_formats(model, self.settings)
                if model.num_rows is not None:
                    self.settings = replace(self.settings, max_batch=model.num_rows)
                self.metrics.loaded(model)
            case Added(choices, error):
                call = self.owners.get(choices[0])
                if call is not None:
                    call.added(error)
            case RoundEvent():
                self._on_round(event)
            case FailedEvent(error):
                self.failure = error
                if self.model is not None:
                    log.error("the engine failed", exc_info=error)
                for call in self.calls:
                    call.fail(engine_failed())
                self.failed.set()

    def _on_round(self, event: RoundEvent) -> None:
        self.metrics.round(event)
        outputs = [output for output in event.outputs if output.choice in self.owners]  # others were cancelled
        for output in outputs:
            self.metrics.count_output(output, output.choice.add(output.chunk))
        by_call: dict[ServerCall, list[Output]] = {}
        for output in outputs:
            by_call.setdefault(self.owners[output.choice], []).append(output)
        for call, group in by_call.items():
            call.on_outputs(group)
            error = next((output.chunk.error for output in group if output.chunk.error is not None), None)
            if error is not None:
                log.warning("a request failed: %s", error)
                call.fail(of_request(error))

    def _kv_use(self) -> float:
        """Return the share of the KV cache used by running choices."""
        if self.model is None:
            return 0.0
        used = sum(len(c.prompt) + len(c.token_ids) for c in self.owners if c.first is not None and not c.ended)
        return used / (self.settings.max_batch * self.model.max_context)


def _with_formats(model: ServedModel, settings: ServerSettings) -> ServedModel:
    """Return a model with the formats of its chat template."""
    form = format_of(model.tokenizer.tool_template, settings.tool_format)
    reasoning = None if settings.reasoning_format == "none" else reasoning_of(model.tokenizer)
    shown = [] if reasoning is None else reasoning.tokens(model.tokenizer)
    model.tokenizer.show_as_text([*shown, *([] if form is None else marks_of(form, model.tokenizer))])
    return replace(model, tool_format=form, reasoning=reasoning)


class ServerCall:
    """All choices of one HTTP request, from admission to the last token."""

    def __init__(self, service: Service, model: ServedModel, num_choices: int) -> None:
        self._service, self._num_places = service, num_choices
        self.model = model
        self.choices: list[Choice] = []
        self.warnings: list[str] = []
        """Parts of the request that are honoured only in part."""
        self._news: asyncio.Queue[list[Output] | ApiError | None] = asyncio.Queue()

    async def start(self, choices: Sequence[Choice]) -> None:
        """Submit the choices to the engine; ApiError 400 if it refuses.

        Returns once the engine has queued them, before they have a batch row.
        """
        self.choices = list(choices)
        self._service.owners.update(dict.fromkeys(self.choices, self))
        self._service.engine.add(self.choices)
        await self._next()

    def finish_empty(self, choices: Sequence[Choice]) -> None:
        """Finish choices of no tokens, without the engine."""
        self.choices = list(choices)
        for choice in self.choices:
            choice.finish_reason, choice.ended = "length", True
            choice.logprobs = [] if choice.params.logprobs else None
        self.on_outputs([Output(choice, NO_TOKENS, 0, choice.began) for choice in self.choices])

    async def rounds(self, patience: float | None = None) -> AsyncIterator[list[Output]]:
        """Yield the outputs of each round until all choices have ended.

        Yields an empty list after `patience` seconds without output. Raises ApiError if the engine fails or the server
        stops first.
        """
        while not (self._news.empty() and all(choice.ended for choice in self.choices)):
            try:
                async with asyncio.timeout(patience):
                    outputs = await self._next()
            except TimeoutError:
                outputs = []
            yield outputs

    async def finish(self) -> None:
        """Wait until all choices have ended; raise ApiError as `rounds` does."""
        async for _ in self.rounds():
            pass

    def close(self) -> None:
        """Cancel running choices and release their places; idempotent."""
        if self not in self._service.calls:
            return
        self._service.calls.remove(self)
        running = [choice for choice in self.choices if not choice.ended]
        if running:
            self._service.engine.cancel(running)
        for choice in self.choices:
            self._service.owners.pop(choice, None)
        self._release(self._num_places)

    def added(self, error: ValueError | None) -> None:
        """Deliver the engine's reply to `start`."""
        self._news.put_nowait([] if error is None else invalid(str(error), code=getattr(error, "code", None)))

    def on_outputs(self, outputs: list[Output]) -> None:
        """Deliver one round's outputs for this call."""
        self._release(sum(output.choice.ended for output in outputs))
        self._news.put_nowait(outputs)

    def fail(self, error: ApiError) -> None:
        """Deliver an error as the last event."""
        self._news.put_nowait(error)

    async def _next(self) -> list[Output]:
        news = await self._news.get()
        if isinstance(news, ApiError):
            raise news
        return news or []

    def _release(self, count: int) -> None:
        self._num_places -= count
        self._service.num_places_used -= count
