"""Path of a request through the engine: its start, the form of its answer, and its stream.

Chats and completions each have a response format; the other APIs render the same answers as blocks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from serve.async_engine import ServerCall, Service
from serve.choice_state import Choice, Tokens, ending, usage
from serve.engine_thread import Output, ServedModel
from serve.errors import ApiError, invalid
from serve.parsing.grammar import compiled
from serve.routes.tokens import TokenTexts, check_ids, max_answer_tokens, token_text
from serve.schemas import Generation
from sharesd import __version__
from sharesd.models.tokenizer import Tokenizer

if TYPE_CHECKING:  # it needs torch
    from sharesd.engine.outputs import TokenChunk

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def served_name(service: Service, name: str | None) -> str:
    """Return the model's name in an answer: the request's, or the first.

    Raises ApiError 404 for any other model's name.
    """
    served = service.settings.model_names
    if name is None or name in served:
        return name or served[0]
    message = f"the model {name[:60]!r} does not exist; this server has {' or '.join(map(repr, served))}"
    raise ApiError(404, message, param="model", code="model_not_found")


async def start(
    request: Request, body: Generation, param: str, num_prompts: int, encode: Callable[[ServedModel], list[list[int]]]
) -> ServerCall:
    """Return a queued call.

    The call is closed at the end of the request. Queue places are reserved before encoding. `param`
    names the field of the prompts in errors. Raises ApiError.
    """
    service: Service = request.app.state.service
    served_name(service, body.model)
    n = body.choices_per_prompt
    call = request.state.visit.call = service.open(num_prompts * n)
    check_ids(call.model, list(body.bias), "logit_bias")
    check_ids(call.model, body.stop_token_ids or [], "stop_token_ids")
    prompts = await run_in_threadpool(encode, call.model)
    grammar, call.warnings = await compiled(call.model, body, prompts[0])
    seed = request.state.visit.seed if body.seed is None else body.seed
    choices = []
    for p, prompt in enumerate(prompts):
        token_limit = max_answer_tokens(call.model, prompt, body.token_limit, param)
        if (body.min_tokens or 0) > token_limit:
            message = f"min_tokens is {body.min_tokens} but the answer has room for {token_limit}; lower min_tokens"
            raise invalid(message, "min_tokens")
        try:
            params = body.params(token_limit=token_limit, seed=seed, grammar=grammar)
        except ValueError as error:
            raise invalid(str(error)) from None
        given = {"request_id": request.state.visit.id, "wants_rounds": bool(body.round_details)}
        choices += [Choice(prompt, params, p, p * n + k, **given) for k in range(n)]
    if body.token_limit == 0 and not body.scores_prompt:
        call.finish_empty(choices)
    else:
        await call.start(choices)
    return call


async def respond(request: Request, call: ServerCall, body: Generation, form: ResponseFormat) -> Response:
    """Return the response to a started call, streamed or whole."""
    service: Service = request.app.state.service
    head = {
        "id": form.id_prefix + request.state.visit.id,
        "object": form.chunk_kind if body.stream else form.kind,
        "created": request.state.visit.created,
        "model": served_name(service, body.model),
        "system_fingerprint": f"sharesd-{__version__}",
    }
    if body.stream:
        patience = service.settings.keep_alive
        return event_stream(chunk_events(call, form, head, body, first=warnings_of(call), patience=patience))
    await call.finish()
    choices = [form.whole(choice) for choice in call.choices]
    return JSONResponse({**head, "choices": choices, **ending(call.choices, body), **warnings_of(call)})


def warnings_of(call: ServerCall) -> dict[str, Any]:
    """Return the field of an answer's warnings, if it has some."""
    return {"warnings": call.warnings} if call.warnings else {}


def event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})


class ResponseFormat:
    """Base class of both endpoints' response formats, for one request."""

    kind: str
    """`object` of a whole answer."""
    chunk_kind: str
    """`object` of a streamed chunk."""
    id_prefix: str

    def __init__(self, tokenizer: Tokenizer, body: Generation) -> None:
        self.tokenizer = tokenizer
        self._details, self._logprobs = bool(body.token_details), body.num_top is not None
        self._rounds = bool(body.round_details)
        self._texts: dict[Choice, TokenTexts] = defaultdict(lambda: TokenTexts(tokenizer))

    def part(self, choice: Choice, tokens: TokenChunk) -> dict[str, Any] | None:
        """Return a choice of a streamed chunk; None if there is nothing to send."""
        news = tokens.finish_reason is not None or self._details or self._logprobs or self._rounds
        text = self.streamed(choice, tokens, news=news)
        traces = [] if tokens.round is None else [tokens.round]
        return None if text is None else self._choice(choice, tokens, text) | self._extensions(choice, tokens, traces)

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Return a choice of a whole answer."""
        return self._choice(choice, choice, self.complete(choice)) | self._extensions(choice, choice, choice.traces)

    def streamed(self, choice: Choice, tokens: Tokens, *, news: bool) -> dict[str, Any] | None:
        """Return the text of tokens; None without text unless `news` is true."""
        raise NotImplementedError

    def complete(self, choice: Choice) -> dict[str, Any]:
        """Return the text of a whole answer."""
        raise NotImplementedError

    def finish_reason(self, choice: Choice, tokens: Tokens) -> str | None:
        """Return the finish reason in the endpoint's terms."""
        return tokens.finish_reason

    def logprobs(self, choice: Choice, tokens: Tokens) -> dict[str, Any]:
        """Return the log-probabilities of tokens, which must have some."""
        raise NotImplementedError

    def _choice(self, choice: Choice, tokens: Tokens, text: dict[str, Any]) -> dict[str, Any]:
        logprobs = self.logprobs(choice, tokens) if tokens.logprobs is not None else None
        reason = self.finish_reason(choice, tokens)
        return {"index": choice.index, **text, "logprobs": logprobs, "finish_reason": reason}

    def _extensions(self, choice: Choice, tokens: Tokens, traces: Sequence[Any]) -> dict[str, Any]:
        """Return `tokens`, with sources and drafters, and `rounds`, if wanted."""
        details = {"tokens": self.details(choice, tokens)} if self._details else {}
        return details | ({"rounds": [*map(self._round, traces)]} if self._rounds else {})

    def _round(self, trace: Any) -> dict[str, Any]:
        """Return a round's trace, flat, with the texts of draft tokens."""
        found = trace.to_dict()
        [row] = found.pop("rows")
        return {**found, **row, "texts": [token_text(self.tokenizer, token) for token in row["tokens"]]}

    def details(self, choice: Choice, tokens: Tokens) -> list[dict[str, Any]]:
        """Return text, source and drafter of each token."""
        texts = self._texts[choice].push(tokens.token_ids, last=tokens.finish_reason is not None)
        rows = zip(tokens.token_ids, texts, tokens.sources, tokens.drafters, strict=True)
        return [{"id": i, "text": t, "source": s, "drafter": d} for i, t, s, d in rows]


def alternatives(tokens: Tokens) -> list[list[tuple[int, float]]]:
    """Return the top log-probabilities of each token; empty lists without them."""
    return tokens.top_logprobs or [[] for _ in tokens.token_ids]


async def chunk_events(
    call: ServerCall,
    form: ResponseFormat,
    head: Mapping[str, Any],
    body: Generation,
    *,
    first: Mapping[str, Any],
    patience: float,
) -> AsyncIterator[bytes]:
    """Yield a stream's bytes: events of each round, and keep-alive comments.

    `first` is added to the first event.
    A comment is sent after `patience` seconds without output. After a failure, an error event ends the stream.
    """
    nothing_yet = {"usage": None} if body.wants_usage else {}
    more, num_sent = dict(first), 0
    try:
        async for outputs in call.rounds(patience):
            parts = [part_of(form, output) for output in outputs]
            num_sent += sum(len(output.chunk.token_ids) for output in outputs)
            so_far = {"usage": usage(call.choices, num_sent)} if body.wants_usage_always else nothing_yet
            found = [{**head, "choices": [part], **so_far} for part in parts if part is not None]
            data = [event(more | one) if index == 0 else event(one) for index, one in enumerate(found)]
            more = {} if data else more
            if data or not outputs:
                yield b"".join(data) or KEEP_ALIVE
        if body.wants_usage:
            yield event({**head, "choices": [], **ending(call.choices, body)})
    except ApiError as error:
        yield event(error.body)
    yield DONE


def part_of(form: ResponseFormat, output: Output) -> dict[str, Any] | None:
    """Return an output's choice of a chunk; None if there is nothing to send.

    An error event follows the tokens before a failure, in place of a finish reason.
    """
    chunk = output.chunk
    if chunk.error is None:
        return form.part(output.choice, chunk)
    part = form.part(output.choice, chunk) if chunk.token_ids or chunk.text else None
    return part and {**part, "finish_reason": None}


def event(data: Mapping[str, Any]) -> bytes:
    """Return one event as bytes."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
