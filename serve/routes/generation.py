"""Handlers shared by chats and completions."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from serve.async_engine import Call, Service
from serve.choice_state import Choice
from serve.engine_thread import Model
from serve.errors import ApiError, invalid
from serve.parsing.grammar import compiled
from serve.routes.response_format import ResponseFormat
from serve.routes.stream import events
from serve.routes.tokens import check_ids, max_answer_tokens
from serve.schemas import Generation
from serve.usage import ending
from sharesd import __version__


def served_name(service: Service, name: str | None) -> str:
    """Return the model's name in an answer: the request's, or the first.

    Raises ApiError 404 for any other model's name.
    """
    served = service.settings.model_names
    if name is None or name in served:
        return name or served[0]
    message = f"the model {name[:60]!r} does not exist here; {' or '.join(map(repr, served))} is served"
    raise ApiError(404, message, param="model", code="model_not_found")


async def start(
    request: Request, body: Generation, param: str, num_prompts: int, encode: Callable[[Model], list[list[int]]]
) -> Call:
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
            message = f"min_tokens is {body.min_tokens} and the answer has room for {token_limit}; give at most that"
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


async def respond(request: Request, call: Call, body: Generation, form: ResponseFormat) -> Response:
    """Return the response to a started call, streamed or whole."""
    service: Service = request.app.state.service
    head = {
        "id": form.id_prefix + request.state.visit.id,
        "object": form.chunk_kind if body.stream else form.kind,
        "created": request.state.visit.created,
        "model": served_name(service, body.model),
        "system_fingerprint": f"sharesd-{__version__}",
    }
    warnings = {"warnings": call.warnings} if call.warnings else {}
    if body.stream:
        stream = events(call, form, head, body, first=warnings, patience=service.settings.keep_alive)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})
    await call.finish()
    choices = [form.whole(choice) for choice in call.choices]
    return JSONResponse({**head, "choices": choices, **ending(call.choices, body), **warnings})
