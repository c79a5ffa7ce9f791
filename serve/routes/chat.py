"""Route `POST /v1/chat/completions`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from string import ascii_letters, digits
from typing import Any

from fastapi import Request, Response

from serve.async_engine import ServerCall
from serve.choice_state import Choice, Tokens
from serve.engine_thread import ServedModel
from serve.messages import for_template
from serve.parsing.reasoning import Thoughts, place_after
from serve.parsing.tool_calls import CallPart, CallReader
from serve.routes.generation import ResponseFormat, alternatives, respond, start
from serve.routes.tokens import encode_chat, ending_of, token_bytes, token_text
from serve.schemas import ChatBody, read
from sharesd.data.json_lines import finite


async def chat(request: Request) -> Response:
    """Handle `POST /v1/chat/completions`."""
    body = await read(request, ChatBody)
    call = await chat_call(request, body)
    return await respond(request, call, body, ChatFormat(call.model, body))


async def chat_call(request: Request, body: ChatBody) -> ServerCall:
    """Return the queued call of a chat; raises ApiError."""
    messages = request.state.visit.prompt = for_template(body.messages)
    return await start(request, body, "messages", 1, lambda model: [encode_body(model, body, messages)])


def encode_body(model: ServedModel, body: ChatBody, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ids of a chat's prompt; raises ApiError 400."""
    return encode_chat(
        model,
        messages,
        functions=body.shown_functions,
        ending=ending_of(body),
        variables=body.chat_template_kwargs,
        preferences=body.preferences,
    )


class ChatFormat(ResponseFormat):
    """Response format of chats: messages and deltas."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, model: ServedModel, body: ChatBody) -> None:
        super().__init__(model.tokenizer, body)
        self._model, self._body = model, body
        self._marks = None if body.reasoning_format == "none" else model.reasoning
        self._begun: set[Choice] = set()
        self._readers: dict[Choice, CallReader] = {}
        self._called: set[Choice] = set()
        self._thoughts: dict[Choice, Thoughts] = {}

    def streamed(self, choice: Choice, tokens: Tokens, *, news: bool) -> dict[str, Any] | None:
        reasoning, content, calls = self._read(choice, tokens)
        delta = {
            **({"reasoning_content": reasoning} if reasoning else {}),
            **({"content": content} if content or not (calls or reasoning) else {}),
            **({"tool_calls": calls} if calls else {}),
        }
        if not (reasoning or content or calls or news):
            return None
        role = {} if choice in self._begun else {"role": "assistant"}
        self._begun.add(choice)
        return {"delta": {**role, **delta}}

    def complete(self, choice: Choice) -> dict[str, Any]:
        reasoning, content, calls = self._read(choice, choice)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return {"message": message}

    def finish_reason(self, choice: Choice, tokens: Tokens) -> str | None:
        return "tool_calls" if tokens.finish_reason == "stop" and choice in self._called else tokens.finish_reason

    def _read(self, choice: Choice, tokens: Tokens) -> tuple[str, str, list[dict[str, Any]]]:
        """Return reasoning, content and tool calls in OpenAI's format."""
        body, form, last = self._body, self._model.tool_format, tokens.finish_reason is not None
        reasoning, content = self._without_reasoning(choice, tokens, last)
        if form is None or not body.shown_functions:
            return reasoning, content, []
        if choice not in self._readers:
            schemas = {function.name: function.arguments for function in body.callable_functions}
            max_calls = body.max_calls if form.several else 1
            self._readers[choice] = CallReader(form, schemas, max_calls=max_calls, must=body.must_call, schemas=schemas)
        found = self._readers[choice].push(content, last=last)
        if found.calls:
            self._called.add(choice)
        return reasoning, found.content, [_call(choice, part) for part in found.calls]

    def _without_reasoning(self, choice: Choice, tokens: Tokens, last: bool) -> tuple[str, str]:
        if self._marks is None:
            return "", tokens.text
        if choice not in self._thoughts:
            place = place_after(self._marks, self.tokenizer, choice.prompt, self._body.begun)
            self._thoughts[choice] = Thoughts(self._marks, self.tokenizer, place)
        thoughts = self._thoughts[choice]
        reasoning, content = thoughts.reader.push(tokens.text, last=last)
        choice.reasoning_tokens += thoughts.count(tokens.token_ids)
        return "" if self._body.include_reasoning is False else reasoning, content

    def details(self, choice: Choice, tokens: Tokens) -> list[dict[str, Any]]:
        rows = super().details(choice, tokens)
        if self._marks is None:
            return rows
        flags = self._thoughts[choice].flags[-len(rows) :] if rows else []
        return [row | ({"reasoning": True} if flag else {}) for row, flag in zip(rows, flags, strict=True)]

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


def _call(choice: Choice, part: CallPart) -> dict[str, Any]:
    """Return a call in OpenAI's format.

    Ids have nine characters, as Mistral's templates require. They depend on the request, its prompt, its seed and the
    position of the call, so that a file of requests gets the same ids from any number of processes.
    """
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    place = (choice.request_id, choice.params.seed, choice.prompt, choice.index, part.index)
    mixed, alphabet = hashlib.sha256(repr(place).encode()).digest(), ascii_letters + digits
    call_id = "".join(alphabet[byte % len(alphabet)] for byte in mixed[:9])
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": call_id, "type": "function", "function": function}
