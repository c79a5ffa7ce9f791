"""Sampling parameters of one request. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from sharesd.config import check_min, check_one_of

Acceptance = Literal["match", "rejection", "block"]
MAX_TOP_LOGPROBS = 20
"""Alternatives per token at most."""


def _finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; give a finite number")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it stops. The defaults are greedy decoding."""

    max_new_tokens: int = 128
    """Tokens to generate at most (exact, whatever the draft length); 0 with `prompt_logprobs` only."""
    temperature: float = 0.0
    """0 = greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p; 1 = all."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest; 0 = none."""
    repetition_penalty: float = 1.0
    """Divide positive, multiply negative logits of tokens in the prompt or the output (Keskar et al. 2019); 1 = no."""
    presence_penalty: float = 0.0
    """Subtract from logits of tokens that the output already has."""
    frequency_penalty: float = 0.0
    """Subtract, times their count, from logits of tokens that the output already has."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> amount added to its logit; -inf bans the token."""
    seed: int = 0
    """Seed of the noise; with acceptance `match` the text depends on nothing else. Of several prompts in one call the
    first has this seed, and the others have seeds derived from it and their place in the call, however many are decoded
    together (`sharesd.sampling.seeds_of_prompts`)."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; the text is cut before the first one."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text, besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence ids."""
    logprobs: bool = False
    """Return the target's log-probability of every emitted token (before any processing of logits)."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to return with their log-probabilities, at each place; needs `logprobs`."""
    prompt_logprobs: bool = False
    """Return log-probabilities of the prompt's tokens, too; needs `logprobs`. The prompt is read anew as a whole."""
    speculate: bool = True
    """Whether drafts may be made for this request; the text is the same."""
    grammar: str | None = None
    """Grammar of the answer: a JSON schema, a regular expression or Lark, converted by `sharesd.data.grammar_spec`.
    Text that the grammar cannot complete ends as one that is cut short."""
    acceptance: Acceptance = "match"
    """`match`: the text of plain decoding, token for token. `rejection` (Leviathan et al. 2022; Chen et al. 2023) and
    `block` (Sun et al. 2024): only the same *distribution* as plain decoding, not the same text."""

    def __post_init__(self) -> None:
        check_min("max_new_tokens", self.max_new_tokens, 0 if self.prompt_logprobs else 1)
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
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs} but logprobs is off; switch logprobs on")
        if self.prompt_logprobs and not self.logprobs:
            raise ValueError("prompt_logprobs is on but logprobs is off; switch logprobs on")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be between 0 and 2^63 - 1")
        if any(not s for s in self.stop):
            raise ValueError("stop holds an empty string; give the text to stop at")
        check_one_of("acceptance", self.acceptance, get_args(Acceptance))
        if self.grammar is not None:
            self._check_grammar(self.grammar)

    def _check_grammar(self, grammar: str) -> None:
        if not grammar.strip():
            raise ValueError("grammar is empty; leave it out")
        if self.acceptance != "match":
            raise ValueError(f"acceptance {self.acceptance} knows no grammars; take match, or leave grammar out")
        if self.ignore_eos:
            raise ValueError("ignore_eos is set and so is grammar, behind whose end nothing may follow; leave one out")

    @property
    def greedy(self) -> bool:
        """True when no noise is needed: the argmax decides."""
        return self.temperature == 0

    @property
    def uses_penalties(self) -> bool:
        """True when a logit depends on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
