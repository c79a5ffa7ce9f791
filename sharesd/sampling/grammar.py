"""Grammars: tokens allowed after a text and after each draft node.

Legend: T = N + 1 positions of a round (the root and N nodes), V vocabulary, W words of 32 tokens each.
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

MAX_COMPILED = 64
"""Number of kept compiled grammars; the least recently used is dropped first."""
MAX_LEXER_STATES = 20_000
"""Most lexer states of a grammar, of one or two kilobytes each."""
_SHOWN = 300
"""Characters of llguidance's reason that an error repeats."""


class Grammars:
    """Grammars for one tokenizer, compiled once each. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`vocab_size` may exceed the tokenizer's; any of `eos_ids` ends a text."""
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(dict.fromkeys(eos_ids))
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the start of a text.

        Raises ValueError if the grammar does not compile or allows no text, if the package is missing or does not
        support the tokenizer, or if the model has no end token.
        """
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return Matcher(compiled.deep_copy())

    def _compile(self, grammar: str) -> LLMatcher:
        package, vocabulary = llguidance(), self._read_vocabulary()
        limits = package.LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
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
    """State of a text in its grammar."""

    def __init__(self, state: LLMatcher) -> None:
        self._state = state
        self._ahead: dict[int, LLMatcher] = {}  # of nodes of the last draft
        self._children: dict[tuple[int, int], int] = {}  # by parent and token

    def fill_mask(self, grammar_mask_TW: Tensor, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> list[int]:
        """Write the tokens allowed after the text and each draft node.

        `grammar_mask_TW`: bits of int32 [T, W] on the host. `tokens` and `parents` are the nodes' (-1: no node; the
        root). Returns nodes at which a limit of the package was reached; these must not be accepted.
        """
        self._ahead, self._children = {-1: self._state}, {}
        _write(self._state, grammar_mask_TW[0])
        lost = []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            before = self._ahead.get(parent)
            if token < 0 or before is None:
                continue
            state = before.deep_copy()
            if not _takes(state, token):
                continue
            _write(state, grammar_mask_TW[1 + node])
            if state.is_error():
                lost.append(node)
                continue
            self._ahead[node] = state
            self._children[parent, token] = node
        return lost

    @property
    def warnings(self) -> list[str]:
        """Parts of a lenient grammar that are not kept, in llguidance's words."""
        return list(self._state.get_grammar_warnings())

    def advance(self, tokens: Sequence[int]) -> int:
        """Append tokens up to the first forbidden one; return their number."""
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


def apply_grammar_mask(logits_BTV: Tensor, grammar_mask_BTW: Tensor) -> Tensor:
    """Return logits with forbidden tokens at -inf."""
    bit_32 = torch.arange(32, dtype=torch.int32, device=grammar_mask_BTW.device)
    is_legal_BTV = ((grammar_mask_BTW[..., None] >> bit_32) & 1).flatten(-2)[..., : logits_BTV.shape[-1]].bool()
    return logits_BTV.masked_fill(~is_legal_BTV, -torch.inf)


def _takes(state: LLMatcher, token: int) -> bool:
    """Append a token if allowed; after the grammar's end only end tokens."""
    if state.is_stopped():
        return state.is_accepting() and not state.is_error() and state.consume_token(token)
    return state.try_consume_tokens([token]) == 1


def _write(state: LLMatcher, grammar_mask_W: Tensor) -> None:
    bits = torch.frombuffer(bytearray(state.compute_bitmask()), dtype=torch.int32)
    grammar_mask_W.copy_(bits[: len(grammar_mask_W)])
