"""Grammars: which tokens may follow a text, and each node of a draft, by the package llguidance.

Grammars are written by `sharesd/data/grammar_spec.py`.

Legend: T = N + 1 places of a round (the root and N nodes), V vocabulary, W words of 32 tokens each.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharesd.data.grammar_spec import llguidance
from sharesd.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_KEPT = 64
"""Compiled grammars that are kept; the one that was used longest ago goes first."""
MOST_LEXER_STATES = 20_000
"""Of a grammar: each takes one or two kilobytes. Its other limits are llguidance's own."""
_SHOWN = 300
"""Characters of llguidance's reason that an error repeats."""


class Grammars:
    """Grammars for one tokenizer, compiled once each. May be used by any thread."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's, which may be larger than the tokenizer's; a text ends with any of `eos_ids`."""
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(dict.fromkeys(eos_ids))
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, grammar: str) -> Matcher:
        """At the beginning of a text. ValueError for a grammar that cannot be compiled or that no text has; where the
        package is missing; where it does not know the tokenizer; for a model whose texts have no end.
        """
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        return Matcher(compiled.deep_copy())

    def _compile(self, grammar: str) -> LLMatcher:
        package, vocabulary = llguidance(), self._read_vocabulary()
        limits = package.LLParserLimits(verbose_errors=False, max_lexer_states=MOST_LEXER_STATES)
        compiled = package.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        compiled.compute_bitmask()
        if compiled.is_error():
            reason = " ".join(compiled.get_error().split())[:_SHOWN]
            if reason.startswith("NoExtensionBias"):
                reason = "there is no text that it allows and this vocabulary can write"
            raise ValueError(f"the grammar cannot be compiled: {reason}")
        return compiled

    def _read_vocabulary(self) -> LLTokenizer:
        if not self._eos_ids:
            raise ValueError("this model has no token that ends a text, which a grammar needs")
        with self._lock:
            if self._vocabulary is None:
                size = max(self._vocab_size, self._tokenizer.vocab_size)
                text = self._tokenizer.backend.to_str()
                try:
                    made = llguidance().LLTokenizer(text, n_vocab=size, eos_token=self._eos_ids)
                except Exception as error:  # the package raises nothing narrower
                    reason = str(error).partition("\n")[0][:_SHOWN]
                    raise ValueError(f"grammars do not know this model's tokenizer: {reason}") from error
                self._vocabulary = made
            return self._vocabulary


class Matcher:
    """Where a text stands in its grammar."""

    def __init__(self, state: LLMatcher) -> None:
        self._state = state
        self._ahead: dict[int, LLMatcher] = {}  # of nodes of the last draft
        self._children: dict[tuple[int, int], int] = {}  # by parent and token

    def allow(self, legal_TW: Tensor, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> list[int]:
        """Write which tokens may follow the text and each node of a draft: bits of int32 [T, W] on the host.

        `tokens` and `parents` are those of the nodes (-1: no node; the root). Nodes that the grammar does not allow,
        and those behind them, are left alone: nothing accepts them. So are nodes whose walk came to a limit of the
        package; these are returned, and must not be accepted.
        """
        self._ahead, self._children = {-1: self._state}, {}
        _write(self._state, legal_TW[0])
        lost = []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            before = self._ahead.get(parent)
            if token < 0 or before is None:
                continue
            state = before.deep_copy()
            if not _takes(state, token):
                continue
            _write(state, legal_TW[1 + node])
            if state.is_error():
                lost.append(node)
                continue
            self._ahead[node] = state
            self._children[parent, token] = node
        return lost

    def advance(self, tokens: Sequence[int]) -> int:
        """The text goes on with these. Returns how many of them the grammar takes; nothing may follow after fewer."""
        node: int | None = -1
        for count, token in enumerate(tokens):
            child = self._children.get((node, token)) if node is not None else None
            if child is not None:
                self._state = self._ahead[child]
            elif not _takes(self._state, token):
                return count
            node = child
        self._ahead, self._children = {}, {}
        return len(tokens)


def forbid(logits_BTV: Tensor, legal_BTW: Tensor) -> Tensor:
    """Logits with tokens that are not among the bits of `legal` (int32) at -inf."""
    bit_32 = torch.arange(32, dtype=torch.int32, device=legal_BTW.device)
    is_legal_BTV = ((legal_BTW[..., None] >> bit_32) & 1).flatten(-2)[..., : logits_BTV.shape[-1]].bool()
    return logits_BTV.masked_fill(~is_legal_BTV, -torch.inf)


def _takes(state: LLMatcher, token: int) -> bool:
    """Go on with this token, if the grammar allows it; at its end nothing but an end token is tried in earnest."""
    if state.is_stopped():
        return state.is_accepting() and not state.is_error() and state.consume_token(token)
    return state.try_consume_tokens([token]) == 1


def _write(state: LLMatcher, legal_W: Tensor) -> None:
    bits = torch.frombuffer(bytearray(state.compute_bitmask()), dtype=torch.int32)
    legal_W.copy_(bits[: len(legal_W)])
