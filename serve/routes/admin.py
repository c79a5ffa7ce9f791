"""Routes for model, version, health, metrics, the page, and token ids in vLLM's format."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from serve.async_engine import Service
from serve.engine_thread import ServedModel
from serve.errors import unavailable
from serve.messages import for_template
from serve.routes.generation import served_name
from serve.routes.tokens import decode, encode_chat, ending_of, token_text
from serve.schemas import DetokenizeBody, TokenizeBody, read
from sharesd import __version__

PAGE = Path(__file__).parents[1] / "page"
"""Folder of the chat page: `index.html` and its files."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'"
)
"""Content-Security-Policy of the page, equal to that in `index.html`."""
_STARTED = int(time.time())


async def models(request: Request) -> dict[str, Any]:
    """Handle `GET /v1/models`: the one model under each of its names."""
    service: Service = request.app.state.service
    return {"object": "list", "data": [_card(service, name) for name in service.settings.model_names]}


async def one_model(request: Request, name: str) -> dict[str, Any]:
    """Handle `GET /v1/models/NAME`."""
    service: Service = request.app.state.service
    return _card(service, served_name(service, name))


async def health(request: Request) -> dict[str, Any]:
    """Handle `GET /health`: 200 while requests are served, else 503."""
    unavailable_reason = request.app.state.service.unavailable_reason
    if unavailable_reason is not None:
        raise unavailable(unavailable_reason)
    return {"status": "ok"}


async def metrics(request: Request) -> Response:
    """Handle `GET /metrics`."""
    return Response(request.app.state.service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


async def version(request: Request) -> dict[str, str]:
    """Handle `GET /version`."""
    return {"version": __version__, "mode": request.app.state.service.settings.mode}


async def page(request: Request) -> Response:
    """Handle `GET /`: the chat page."""
    if not (PAGE / "index.html").exists():
        return PlainTextResponse("this installation has no page\n", 404)
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": f"{POLICY}; frame-ancestors 'none'",  # ignored in a page's own meta tag
    }
    return FileResponse(PAGE / "index.html", headers=headers)


def _card(service: Service, name: str) -> dict[str, Any]:
    model, settings = service.ready_model(), service.settings
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "sharesd",
        "root": settings.root,
        "parent": None,
        "max_model_len": model.max_context,
    }


async def tokenize(request: Request) -> JSONResponse:
    """Return token ids of a text or of a templated conversation."""
    body = await read(request, TokenizeBody)
    model = _model(request, body.model)
    return await run_in_threadpool(_tokenized, model, body)


async def detokenize(request: Request) -> JSONResponse:
    """Return the text of token ids."""
    body = await read(request, DetokenizeBody)
    model = _model(request, body.model)
    return await run_in_threadpool(_detokenized, model, body)


async def tokenizer_info(request: Request) -> JSONResponse:
    """Handle `GET /tokenizer_info`: roles of tokens, and the chat template."""
    model = _model(request, None)
    tokenizer = model.tokenizer
    ends = [tokenizer.token(i) for i in tokenizer.eos_ids[:1]]
    roles = {"bos_token": None, "eos_token": next(iter(ends), None), "pad_token": None, "unk_token": None}
    return JSONResponse(
        {
            **roles,
            **tokenizer.special,
            "chat_template": tokenizer.chat_template,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": model.max_context,
        }
    )


def _model(request: Request, name: str | None) -> ServedModel:
    service = request.app.state.service
    served_name(service, name)
    return service.ready_model()


# Answers may be megabytes long, so their JSON is also made on the worker thread.


def _tokenized(model: ServedModel, body: TokenizeBody) -> JSONResponse:
    tokens = _ids(model, body)
    texts = [token_text(model.tokenizer, token) for token in tokens] if body.return_token_strs else None
    more = {} if texts is None else {"token_strs": texts}
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": model.max_context, **more})


def _detokenized(model: ServedModel, body: DetokenizeBody) -> JSONResponse:
    return JSONResponse({"prompt": decode(model, body.tokens, "tokens")})


def _ids(model: ServedModel, body: TokenizeBody) -> list[int]:
    if body.messages is None:
        return model.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
    return encode_chat(
        model,
        for_template(body.messages),
        functions=[tool.function for tool in body.tools or ()],
        ending=ending_of(body),
        variables=body.chat_template_kwargs,
    )
