"""Routes `/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's format."""

from __future__ import annotations

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from serve.engine_thread import ServedModel
from serve.messages import for_template
from serve.routes.generation import served_name
from serve.routes.tokens import decode, encode_chat, ending_of, token_text
from serve.schemas import DetokenizeBody, TokenizeBody, read


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
