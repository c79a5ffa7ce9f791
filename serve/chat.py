"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from serve.answer import respond, start
from serve.choice import Choice, Tokens
from serve.form import Form, alternatives, finite
from serve.schemas import ChatBody, read
from serve.tokens import encode_chat, token_bytes, token_text
from sharesd.models.tokenizer import Tokenizer


async def chat(request: Request) -> Response:
    """Answer a conversation."""
    body = await read(request, ChatBody)
    messages = request.state.visit.prompt = [message.for_template() for message in body.messages]
    call = await start(request, body, "messages", 1, lambda model: [encode_chat(model, messages)])
    return await respond(request, call, body, ChatForm(call.model.tokenizer, body))


class ChatForm(Form):
    """Messages and deltas."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, tokenizer: Tokenizer, body: ChatBody) -> None:
        super().__init__(tokenizer, body)
        self._begun: set[Choice] = set()

    def streamed(self, choice: Choice, tokens: Tokens) -> dict[str, Any]:
        role = {} if choice in self._begun else {"role": "assistant"}
        self._begun.add(choice)
        return {"delta": {**role, "content": tokens.text}}

    def complete(self, choice: Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": choice.text, "refusal": None}}

    def logprobs(self, choice: Choice, tokens: Tokens) -> dict[str, Any]:
        assert tokens.logprobs is not None
        rows = zip(tokens.token_ids, tokens.logprobs, alternatives(tokens), strict=True)
        return {
            "content": [
                {**self._token(token, logprob), "top_logprobs": [self._token(i, value) for i, value in top]}
                for token, logprob, top in rows
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = token_text(self.tokenizer, token), token_bytes(self.tokenizer, token)
        return {"token": text, "logprob": finite(logprob), "bytes": data}
