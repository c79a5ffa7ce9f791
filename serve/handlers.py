"""From a checked body to an answer, streamed or whole: what chats and completions have in common."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from serve.async_engine import Call, Service
from serve.choice_state import Choice
from serve.engine_thread import Model
from serve.errors import ApiError, invalid
from serve.grammar import compiled
from serve.response_format import Form
from serve.schemas import Generation
from serve.stream import events
from serve.token_utils import check_ids, room
from serve.usage import ending
from sharesd import __version__


def check_name(service: Service, name: str | None) -> None:
    """ApiError 404 unless this is the model's name, or none was given."""
    served = service.settings.model_name
    if name is not None and name != served:
        message = f"the model {name[:60]!r} does not exist here; {served!r} is served"
        raise ApiError(404, message, param="model", code="model_not_found")


async def start(
    request: Request, body: Generation, param: str, num_prompts: int, encode: Callable[[Model], list[list[int]]]
) -> Call:
    """A call that the engine has taken; it is closed when the request ends. ApiError for whatever stands in its way.

    Places in the queue are taken before anything is encoded. `param` is where prompts come in.
    """
    service: Service = request.app.state.service
    check_name(service, body.model)
    n = body.choices_per_prompt
    call = request.state.visit.call = service.open(num_prompts * n)
    check_ids(call.model, list(body.bias), "logit_bias")
    check_ids(call.model, body.stop_token_ids or [], "stop_token_ids")
    prompts = await run_in_threadpool(encode, call.model)
    grammar = await compiled(call.model, body)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    choices = []
    for p, prompt in enumerate(prompts):
        most_tokens = room(call.model, prompt, body.most_tokens, param)
        try:
            params = body.params(most_tokens=most_tokens, seed=seed, grammar=grammar)
        except ValueError as error:
            raise invalid(str(error)) from None
        choices += [Choice(prompt, params, p, p * n + k) for k in range(n)]
    await call.start(choices)
    return call


async def respond(request: Request, call: Call, body: Generation, form: Form) -> Response:
    """The answer to a call that was started."""
    settings = request.app.state.service.settings
    head = {
        "id": form.id_prefix + request.state.visit.id,
        "object": form.chunk_kind if body.stream else form.kind,
        "created": int(time.time()),
        "model": settings.model_name,
        "system_fingerprint": f"sharesd-{__version__}",
    }
    if body.stream:
        stream = events(call, form, head, body, patience=settings.keep_alive)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})
    await call.finish()
    choices = [form.whole(choice) for choice in call.choices]
    return JSONResponse({**head, "choices": choices, **ending(call.choices, body)})
