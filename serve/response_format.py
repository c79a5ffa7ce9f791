"""How an endpoint writes what the engine gives: the choices of streamed chunks and of whole answers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from serve.choice_state import Choice, Tokens
from serve.schemas import Generation
from serve.token_utils import TokenTexts
from sharesd.models.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON does not have."""


class Form:
    """The base of both endpoints' forms; belongs to one request."""

    kind: str
    """`object` of a whole answer."""
    chunk_kind: str
    """`object` of a streamed chunk."""
    id_prefix: str

    def __init__(self, tokenizer: Tokenizer, body: Generation) -> None:
        self.tokenizer = tokenizer
        self._details, self._logprobs = bool(body.token_details), body.num_top is not None
        self._texts: dict[Choice, TokenTexts] = defaultdict(lambda: TokenTexts(tokenizer))

    def part(self, choice: Choice, tokens: Tokens) -> dict[str, Any] | None:
        """A choice of a streamed chunk; None where there is nothing to tell yet."""
        news = tokens.finish_reason is not None or self._details or self._logprobs
        text = self.streamed(choice, tokens, news=news)
        return None if text is None else self._choice(choice, tokens, text) | self._token_details(choice, tokens)

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A choice of an answer."""
        return self._choice(choice, choice, self.complete(choice)) | self._token_details(choice, choice)

    def streamed(self, choice: Choice, tokens: Tokens, *, news: bool) -> dict[str, Any] | None:
        """The text of some tokens; None where there is none yet, unless there is other `news` of them."""
        raise NotImplementedError

    def complete(self, choice: Choice) -> dict[str, Any]:
        """The text of an answer."""
        raise NotImplementedError

    def finish_reason(self, choice: Choice, tokens: Tokens) -> str | None:
        """Why the answer ended with these tokens, in the endpoint's words."""
        return tokens.finish_reason

    def logprobs(self, choice: Choice, tokens: Tokens) -> dict[str, Any]:
        """The log-probabilities of tokens; there are some."""
        raise NotImplementedError

    def _choice(self, choice: Choice, tokens: Tokens, text: dict[str, Any]) -> dict[str, Any]:
        logprobs = self.logprobs(choice, tokens) if tokens.logprobs is not None else None
        reason = self.finish_reason(choice, tokens)
        return {"index": choice.index, **text, "logprobs": logprobs, "finish_reason": reason}

    def _token_details(self, choice: Choice, tokens: Tokens) -> dict[str, Any]:
        """The extension `tokens`: who made each."""
        if not self._details:
            return {}
        texts = self._texts[choice].push(tokens.token_ids, last=tokens.finish_reason is not None)
        rows = zip(tokens.token_ids, texts, tokens.sources, tokens.drafters, strict=True)
        return {"tokens": [{"id": i, "text": t, "source": s, "drafter": d} for i, t, s, d in rows]}


def alternatives(tokens: Tokens) -> list[list[tuple[int, float]]]:
    """For each token the likeliest ones; none where none were asked for."""
    return tokens.top_logprobs or [[] for _ in tokens.token_ids]


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)
