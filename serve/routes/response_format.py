"""Choices of streamed chunks and whole answers, by endpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from serve.choice_state import Choice, Chunk, Tokens
from serve.routes.tokens import TokenTexts, token_text
from serve.schemas import Generation
from sharesd.models.tokenizer import Tokenizer


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

    def part(self, choice: Choice, tokens: Chunk) -> dict[str, Any] | None:
        """Return a choice of a streamed chunk; None without new text."""
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
