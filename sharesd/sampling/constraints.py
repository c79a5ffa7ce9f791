"""Constraints: tokens that a grammar or a minimum length allows after a text and after each draft node.

Legend: T = N + 1 positions of a round (the root and N nodes), V vocabulary, W words of 32 tokens each.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharesd.data.grammar_spec import llguidance
from sharesd.data.request_errors import GrammarTooComplex

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from sharesd.models.tokenizer import Tokenizer

MAX_COMPILED = 64
"""Number of kept compiled grammars; the least recently used is dropped first."""
MAX_LEXER_STATES = 20_000
"""Maximum lexer states of a grammar, of one or two kilobytes each."""
MAX_PROBED = 8
"""Maximum first tokens that are tried when a grammar is compiled."""
_LIMIT = re.compile(r"too (big|many|complex|large)|limit")
"""What the package writes where a grammar is beyond its limits, not wrong."""
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
        support the tokenizer, or if the model has no end token; its subclass GrammarTooComplex for a grammar that
        reaches a limit of the package at its first token.
        """
        return Matcher(self, grammar, self._start(grammar))

    def _start(self, grammar: str) -> LLMatcher:
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def reread(self, grammar: str, tokens: Sequence[int]) -> LLMatcher:
        """Return a newly compiled grammar's state after a text.

        Copies of a state share one lexer, which keeps what any request or draft has looked at, up to a limit. This one
        has looked at nothing else, so whether it reaches a limit too depends only on the text. If it does, it is
        not kept for later requests, either.
        """
        with self._lock:
            self._compiled.pop(grammar, None)
        state = self._start(grammar)
        for token in tokens:
            state.consume_token(token)
        state.compute_bitmask()
        if _is_at_limit(state):
            with self._lock:
                self._compiled.pop(grammar, None)
        return state

    def _compile(self, grammar: str) -> LLMatcher:
        package, vocabulary = llguidance(), self._read_vocabulary()
        limits = package.LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
        compiled: LLMatcher = package.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        bits = compiled.compute_bitmask()
        if compiled.is_error():
            reason = _reason(compiled)
            if not _is_at_limit(compiled):
                reason = "it allows no text that this vocabulary can write"
            error = GrammarTooComplex if _LIMIT.search(reason) else ValueError
            raise error(f"the grammar cannot be compiled: {reason}")
        _probe(compiled, bits)
        return compiled

    def _read_vocabulary(self) -> LLTokenizer:
        if not self._eos_ids:
            raise ValueError("a grammar needs a token that ends the text, and this model has none")
        with self._lock:
            if self._vocabulary is None:
                size = max(self._vocab_size, self._tokenizer.vocab_size)
                text = self._tokenizer.backend.to_str()
                try:
                    made = llguidance().LLTokenizer(text, n_vocab=size, eos_token=self._eos_ids)
                except Exception as error:  # the package raises nothing narrower
                    reason = str(error).partition("\n")[0][:_SHOWN]
                    raise ValueError(f"grammars do not support this model's tokenizer: {reason}") from error
                self._vocabulary = made
            return self._vocabulary


class Matcher:
    """State of a text in its grammar."""

    def __init__(self, grammars: Grammars, grammar: str, state: LLMatcher) -> None:
        """`state` is that of the start."""
        self._grammars, self._grammar = grammars, grammar
        self._state: LLMatcher | None = state  # None: a limit was reached, perhaps by others
        self._text: list[int] = []
        self._ahead: dict[int, LLMatcher | None] = {}  # of nodes of the last draft
        self._children: dict[tuple[int, int], int] = {}  # by parent and token
        self.limit: str | None = None
        """Limit of the package that the text has reached; no further token is allowed."""

    def fill_mask(self, grammar_mask_TW: Tensor, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> list[int]:
        """Write the tokens allowed after the text and each draft node.

        `grammar_mask_TW`: bits of int32 [T, W] on the host. `tokens` and `parents` are the nodes' (-1: no node; the
        root). A row without any token: the grammar, or a limit of the package, lets none follow. Returns nodes at which
        such a limit was reached; these must not be accepted, so that the next round looks again, as without a draft.
        """
        state = self._state
        if state is not None:
            _write(state, grammar_mask_TW[0])
        if state is None or (_is_at_limit(state) and self.limit is None):
            state = self._state = self._grammars.reread(self._grammar, self._text)
            _write(state, grammar_mask_TW[0])
            self.limit = _reason(state) if _is_at_limit(state) else None
        self._ahead, self._children = {-1: state}, {}
        lost = []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            before = self._ahead.get(parent)
            if token < 0 or before is None:
                continue
            after = before.deep_copy()
            is_taken = _takes(after, token)
            if is_taken:
                _write(after, grammar_mask_TW[1 + node])
            elif not _is_allowed(grammar_mask_TW[1 + parent], token):
                continue
            if not is_taken or _is_at_limit(after):  # the package does not always report that a limit was the reason
                lost.append(node)
                self._ahead[node] = None
            else:
                self._ahead[node] = after
            self._children[parent, token] = node
        return lost

    @property
    def warnings(self) -> list[str]:
        """Parts of a lenient grammar that are not enforced, in llguidance's words."""
        return [] if self._state is None else list(self._state.get_grammar_warnings())

    def advance(self, tokens: Sequence[int]) -> int:
        """Append tokens; return the number before the first that is rejected.

        Tokens that their mask allows are accepted, unless a limit of the package is reached.
        """
        node: int | None = -1
        for count, token in enumerate(tokens):
            child = self._children.get((node, token)) if node is not None else None
            if child is not None:
                self._state = self._ahead[child]
            elif self._state is None or not _takes(self._state, token):
                self._state = None
            if self._state is None:
                self._text += tokens[count:]
                return count
            self._text.append(token)
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
    if state.is_error():  # the package then names the end token
        grammar_mask_W.zero_()
    else:
        grammar_mask_W.copy_(bits[: len(grammar_mask_W)])


def _probe(compiled: LLMatcher, bits: bytes) -> None:
    """Raise GrammarTooComplex if every first token reaches a limit.

    This needs one step as a rule; of more than MAX_PROBED tokens, others may be possible.
    """
    firsts = (8 * index + bit for index, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1)
    state = compiled
    for token in islice(firsts, MAX_PROBED):
        state = compiled.deep_copy()
        if _takes(state, token):
            state.compute_bitmask()
        if not state.is_error():
            return
    if _is_at_limit(state) and next(firsts, None) is None:
        raise GrammarTooComplex(f"the grammar is too complex at its first token: {_reason(state)}")


def _is_allowed(grammar_mask_W: Tensor, token: int) -> bool:
    return bool(int(grammar_mask_W[token // 32]) >> token % 32 & 1)


def _is_at_limit(state: LLMatcher) -> bool:
    """Return True for an error other than that no token of the vocabulary can continue the text."""
    return state.is_error() and not state.get_error().startswith("NoExtensionBias")


def _reason(state: LLMatcher) -> str:
    """Return the package's words for an error, on one line."""
    return " ".join(state.get_error().replace("<non-verbose/>", "").split())[:_SHOWN]


class MinTokens:
    """Constraint without end tokens before `num_tokens` tokens, within that of `inner`."""

    def __init__(self, num_tokens: int, end_ids: Collection[int], inner: Constraint | None = None) -> None:
        """If `inner` allows only end tokens, none is left."""
        self._num_left, self._end_ids, self._inner = num_tokens, end_ids, inner

    @property
    def limit(self) -> str | None:
        return None if self._inner is None else self._inner.limit

    def fill_mask(self, grammar_mask_TW: Tensor, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> list[int]:
        lost = [] if self._inner is None else self._inner.fill_mask(grammar_mask_TW, tokens, parents)
        if self._num_left <= 0:
            return lost
        allowed_W = _bits_without(self._end_ids, grammar_mask_TW.shape[1])
        depths = [0]
        for parent in parents:
            depths.append(depths[1 + parent] + 1)
        for row, depth in enumerate(depths):
            if depth < self._num_left:
                grammar_mask_TW[row] &= allowed_W
        return lost

    def advance(self, tokens: Sequence[int]) -> int:
        self._num_left -= len(tokens)
        return len(tokens) if self._inner is None else self._inner.advance(tokens)


Constraint = Matcher | MinTokens
"""Tokens allowed after a text; `Matcher` describes the members."""


def _bits_without(ids: Collection[int], num_words: int) -> Tensor:
    """Return bits [W] int32 of all tokens but these."""
    words = [0xFFFFFFFF] * num_words
    for i in ids:
        if i < 32 * num_words:
            words[i // 32] &= ~(1 << (i % 32))
    return torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32)
