"""Sampling parameters of one request. Imports no torch.

The annotations of `SamplingParams` say which types its fields accept, see `sharesd.field_types`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sharesd.field_types import DefaultLimit, NoneIsDefault, check_min, convert_fields, is_utf8, shown

Acceptance = Literal["match", "rejection", "block"]
MAX_TOP_LOGPROBS = 20
"""Maximum alternatives per token."""


def _finite(name: str, value: float) -> None:
    if not math.isfinite(value) or (name != "temperature" and abs(value) > 3e38):  # logits are in float32
        raise ValueError(f"{name} is {value}; give a finite number")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling and stop criteria of one request; greedy by default."""

    max_new_tokens: NoneIsDefault[int] = DefaultLimit(128)
    """Maximum tokens to generate, whatever the draft length.

    0 is allowed with `prompt_logprobs` only. If the context ends before, so does the answer; a warning says so if the
    number was given.
    """
    min_new_tokens: int = 0
    """Tokens before which the text does not end.

    End tokens are not chosen, and stop strings are not looked for. A grammar whose whole text is shorter then leaves no
    token, which is an error.
    """
    temperature: float = 0.0
    """0 = greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens of total probability p.

    1 = all tokens.
    """
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest; 0 = none."""
    repetition_penalty: float = 1.0
    """Penalty factor of tokens in the prompt or the output.

    Positive logits are divided by it, and negative ones are multiplied (Keskar et al. 2019). 1 = no penalty.
    """
    presence_penalty: float = 0.0
    """Subtract from logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtract from logits of tokens in the output, times their count."""
    logit_bias: NoneIsDefault[Mapping[int, float]] = field(default_factory=dict)
    """Token id -> amount added to its logit; -inf bans the token."""
    seed: NoneIsDefault[int] = 0
    """Seed of the noise.

    With acceptance `match`, sampled texts do not depend on the mode or on other requests. The first of several prompts
    in one call has this seed. The others have seeds derived from it and from their index in the call, whatever the
    number of prompts decoded together (`sharesd.sampling.seeds_of_prompts`).
    """
    stop: NoneIsDefault[tuple[str, ...]] = ()
    """Stop strings; the text ends before the first one found.

    A single text is one stop string.
    """
    stop_token_ids: NoneIsDefault[tuple[int, ...]] = ()
    """Token ids that end the text, in addition to the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence ids."""
    logprobs: NoneIsDefault[bool] = False
    """Return the target's log-probability of every emitted token.

    It is computed before any processing of logits.
    """
    top_logprobs: int = 0
    """Number of likeliest tokens to return per position, with log-probabilities.

    Needs `logprobs`.
    """
    prompt_logprobs: NoneIsDefault[bool] = False
    """Return log-probabilities of the prompt's tokens, too.

    Needs `logprobs`. The whole prompt is read again, without reuse of KV.
    """
    speculate: bool = True
    """Allow drafts for this request.

    With acceptance `match`, the text does not depend on it.
    """
    grammar: str | None = None
    """Grammar of the answer, as made by `sharesd.data.grammar_spec`.

    It comes from a JSON schema, a regular expression or Lark. If no token can continue an incomplete text, or the text
    reaches a limit of the grammar engine, the answer ends with finish reason `error`.
    """
    acceptance: Acceptance = "match"
    """Acceptance rule of draft tokens.

    `match`: the text of plain decoding, token for token. `rejection` (Leviathan et al. 2022; Chen et al. 2023) and
    `block` (Sun et al. 2024): the *distribution* of plain decoding, but not the same text.
    """

    def __post_init__(self) -> None:
        convert_fields(self)
        check_min("max_new_tokens", self.max_new_tokens, 0 if self.prompt_logprobs else 1)
        check_min("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens} and max_new_tokens {self.max_new_tokens}; lower the first"
            )
        if self.min_new_tokens and self.acceptance != "match":
            raise ValueError(f"min_new_tokens needs acceptance match, and acceptance is {self.acceptance}")
        for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _finite(name, getattr(self, name))
        check_min("temperature", self.temperature, 0)
        check_min("top_k", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be between 0 and 1")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0")
        for token, amount in self.logit_bias.items():
            if not amount < math.inf:
                raise ValueError(f"logit_bias of token {token} is {amount}; give a finite number, or -inf to ban it")
        self._check_logprobs()
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be between 0 and 2^63 - 1")
        self._check_ends()
        if self.grammar is not None:
            self._check_grammar(self.grammar)

    def _check_logprobs(self) -> None:
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs} but logprobs is off; switch logprobs on")
        if self.prompt_logprobs and not self.logprobs:
            raise ValueError("prompt_logprobs is on but logprobs is off; switch logprobs on")

    def _check_ends(self) -> None:
        if any(not s for s in self.stop):
            raise ValueError("stop holds an empty string; give the text to stop at")
        for text in (*self.stop, self.grammar or ""):
            if not is_utf8(text):
                name = "stop" if text in self.stop else "grammar"
                raise ValueError(f"{name} has {shown(text)}, with a lone surrogate; give text that is valid UTF-8")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids has {min(self.stop_token_ids)}; token ids are at least 0")

    def _check_grammar(self, grammar: str) -> None:
        if not grammar.strip():
            raise ValueError("grammar is empty; leave it out")
        if self.acceptance != "match":
            raise ValueError(f"grammar needs acceptance match, and acceptance is {self.acceptance}")
        if self.ignore_eos:
            raise ValueError("ignore_eos and grammar exclude each other, since a grammar ends the text; leave one out")

    @property
    def greedy(self) -> bool:
        """True if no noise is needed, and the argmax is emitted."""
        return self.temperature == 0

    @property
    def constrained(self) -> bool:
        """True if some tokens are not allowed at some positions."""
        return self.grammar is not None or self.min_new_tokens > 0

    @property
    def uses_penalties(self) -> bool:
        """True if logits depend on earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def cut_by_context(asked: Iterable[tuple[int, SamplingParams]], max_context: int) -> str | None:
    """Return a message on the given length that the context lowers most, or None.

    Args:
        asked: number of prompt tokens, and parameters, of each prompt of a call.
    """
    cuts = [
        (max_context - num_prompt, name, length)
        for num_prompt, params in asked
        for name, length in (("max_new_tokens", params.max_new_tokens), ("min_new_tokens", params.min_new_tokens))
        if 0 < max_context - num_prompt < length and not isinstance(length, DefaultLimit)
    ]
    if not cuts:
        return None
    room, name, length = min(cuts)
    return (
        f"{name} is {length} and the context of {max_context} tokens has room for {room} after a prompt; lower {name} "
        "or raise max_context"
    )
