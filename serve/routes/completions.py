"""Routes `POST /v1/completions` and `POST /predict`, a minimal completion."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from serve.async_engine import ServerCall
from serve.choice_state import Choice, Tokens
from serve.routes.generation import ResponseFormat, respond, start
from serve.routes.tokens import TokenTexts, encode, token_text
from serve.schemas import CompletionBody, PredictBody, read
from sharesd.data.json_lines import finite
from sharesd.models.tokenizer import Tokenizer

DEFAULT_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""


async def completions(request: Request) -> Response:
    """Handle `POST /v1/completions`: complete texts or token ids."""
    body = await read(request, CompletionBody)
    call = await _start(request, body)
    return await respond(request, call, body, CompletionFormat(call.model.tokenizer, body))


async def predict(request: Request) -> Response:
    """Handle `POST /predict`.

    Returns the prompt and 40 sampled tokens as one JSON string.
    """
    prompt = (await read(request, PredictBody)).prompt
    call = await _start(request, CompletionBody(prompt=prompt, max_tokens=40, top_k=10, top_p=0.9))
    await call.finish()
    return JSONResponse(prompt + call.choices[0].text)


async def _start(request: Request, body: CompletionBody) -> ServerCall:
    prompts = request.state.visit.prompt = body.prompts
    if not body.says_limit:
        body = body.model_copy(update={"max_tokens": DEFAULT_TOKENS})
    special = body.add_special_tokens is not False
    return await start(
        request, body, "prompt", len(prompts), lambda model: [encode(model, prompt, special) for prompt in prompts]
    )


class CompletionFormat(ResponseFormat):
    """Response format of completions: texts."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, tokenizer: Tokenizer, body: CompletionBody) -> None:
        super().__init__(tokenizer, body)
        self._prompts = body.prompts if body.echo else None
        self._begun: set[Choice] = set()
        self._scored: set[Choice] = set()
        self._offsets: dict[Choice, tuple[TokenTexts, int]] = {}

    def streamed(self, choice: Choice, tokens: Tokens, *, news: bool) -> dict[str, Any] | None:
        if not (tokens.text or news):
            return None
        echo = "" if choice in self._begun else self._echo(choice)
        self._begun.add(choice)
        return {"text": echo + tokens.text}

    def complete(self, choice: Choice) -> dict[str, Any]:
        return {"text": self._echo(choice) + choice.text}

    def logprobs(self, choice: Choice, tokens: Tokens) -> dict[str, Any]:
        assert tokens.logprobs is not None
        ids, values, top = tokens.token_ids, tokens.logprobs, tokens.top_logprobs or []
        found: dict[str, list[Any]] = {
            "tokens": [token_text(self.tokenizer, token) for token in ids],
            "token_logprobs": [finite(value) for value in values],
            "top_logprobs": [self._by_text(likeliest) for likeliest in top],
            "text_offset": self._text_offsets(choice, tokens),
        }
        if choice.prompt_logprobs is not None and choice not in self._scored:
            self._scored.add(choice)
            before = self._prompt_logprobs(choice)
            found = {name: before[name] + found[name] for name in found}
        return {**found, "top_logprobs": found["top_logprobs"] or None}

    def _prompt_logprobs(self, choice: Choice) -> dict[str, list[Any]]:
        """Return log-probabilities of the prompt; the first token has none."""
        top = choice.prompt_top_logprobs
        return {
            "tokens": [token_text(self.tokenizer, token) for token in choice.prompt],
            "token_logprobs": [None, *(finite(value) for value in choice.prompt_logprobs or ())],
            "top_logprobs": [] if top is None else [None, *map(self._by_text, top)],
            "text_offset": _starts(TokenTexts(self.tokenizer).push(choice.prompt, last=True), 0)[0],
        }

    def _by_text(self, likeliest: list[tuple[int, float]]) -> dict[str, float]:
        """Return text -> log-probability, the maximum if tokens have equal texts."""
        texts: dict[str, float] = {}
        for token, value in likeliest:
            texts.setdefault(token_text(self.tokenizer, token), finite(value))
        return texts

    def _echo(self, choice: Choice) -> str:
        """Return the prompt's text, decoded if given as ids."""
        if self._prompts is None:
            return ""
        prompt = self._prompts[choice.prompt_index]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def _text_offsets(self, choice: Choice, tokens: Tokens) -> list[int]:
        """Return each token's offset in the text."""
        stream, end = self._offsets.get(choice) or (TokenTexts(self.tokenizer), len(self._echo(choice)))
        starts, end = _starts(stream.push(tokens.token_ids, last=tokens.finish_reason is not None), end)
        self._offsets[choice] = stream, end
        return starts


def _starts(texts: Sequence[str], end: int) -> tuple[list[int], int]:
    """Return the offsets of consecutive texts from `end`, and the new end."""
    *starts, end = accumulate(map(len, texts), initial=end)
    return starts, end
