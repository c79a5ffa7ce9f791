"""Drafts that hold as often as is wished: how much a drafter would gain, if it were so good."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from compile.cuda_graphs import WARM_CALLS, Replayed
from sharesd.drafters.base import Drafter, Drafting
from sharesd.engine.engine import Engine
from sharesd.speculation.draft_tree import DraftTree, Shape


class Oracle:
    """A drafter of chains that does all its work, and then says what is known to come.

    Each token of a text is drafted right or wrong, once and for all: a text of one row is decoded in the same rounds
    each time. Everything else is the drafter's within.
    """

    def __init__(self, within: Drafter, lengths_B: Tensor, text: Sequence[int], alpha: float, vocab_size: int) -> None:
        """`text`: prompt and answer. `alpha`: how often a draft token is right."""
        dice = torch.Generator().manual_seed(0)
        right_S = torch.tensor(text)
        holds_S = torch.rand(len(text), generator=dice) < alpha
        self._within, self._lengths_B = within, lengths_B
        self._guess_S = torch.where(holds_S, right_S, (right_S + 1) % vocab_size).to(lengths_B.device)
        self._put: Replayed[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._within, name)

    def draft(self, drafting: Drafting, shape: Shape) -> DraftTree:
        tree = self._within.draft(drafting, shape)
        self.put(drafting)
        return tree

    def put(self, drafting: Drafting) -> None:
        """Write over the tokens that have just been drafted, where they lie."""
        if self._put is None:
            tokens_BN = drafting.buffers.tokens_BN
            ahead_N = torch.arange(1, tokens_BN.shape[1] + 1, device=tokens_BN.device)

            def put() -> None:
                at_BN = (self._lengths_B[:, None] + ahead_N).clamp(max=len(self._guess_S) - 1)
                tokens_BN.copy_(torch.where(tokens_BN < 0, tokens_BN, self._guess_S[at_BN]))

            self._put = Replayed(put, drafting.graphs)
        self._put()


@contextmanager
def knowing(engine: Engine, text: Sequence[int], alpha: float, drafting: Drafting) -> Iterator[None]:
    """Within it, the engine's drafter knows this text; it has one row, and rounds of this kind are warm."""
    drafter = engine.drafter
    assert drafter is not None and len(engine.cache.lengths) == 1
    oracle = Oracle(drafter, engine.cache.lengths, text, alpha, engine.target.vocab_size)
    with torch.inference_mode():
        for _ in range(1 + WARM_CALLS):
            oracle.put(drafting)
    engine.drafter = oracle  # type: ignore[assignment]
    try:
        yield
    finally:
        engine.drafter = drafter
