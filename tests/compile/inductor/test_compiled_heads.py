"""Steps of trained heads as Inductor compiles them: what the heads compute themselves, for any text and any cache.

Legend: B rows, S slots, F features, P states, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.inductor import CompiledMethods, no_recompiles
from sharesd.drafters.heads.head import Head
from tests.helpers.oracle import tiny_decoder
from tests.helpers.tiny_heads import random_head

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
B, S, D, LEAD = 2, 64, 32, 3
TREE = TreeAttentionMask(*(torch.tensor([values] * B) for values in ([0, 0, 1], [[0, 0], [1, 0], [0, 2]])))


def feature_steps(head: Head, steps: Any, seed: int, *, trees: bool) -> Iterator[Tensor]:
    """Logits of a first step, of a chain's next guesses, and of a tree's nodes; then what was kept."""
    dice = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(0, 40, (B, S), generator=dice)
    features_BSF = torch.randn(B, S, len(head.config.taps) * D, generator=dice, dtype=torch.float64)
    cache, states_BPD = head.new_cache(B, S).draft_view(), torch.zeros(B, 9, D, dtype=torch.float64)
    ends_B = torch.tensor([5 + seed, 2])
    cache.lengths.copy_((ends_B - LEAD).clamp(min=0))
    yield steps.read(tokens_BS, features_BSF, LEAD, cache, ends_B, states_BPD)
    cache.lengths.copy_(ends_B)
    if trees:
        yield steps.step(tokens_BS[:, 9:12].contiguous(), states_BPD, cache, TREE)
    for place in (7, 8):
        yield steps.step(tokens_BS[:, place, None], states_BPD, cache, None)
        cache.lengths += 1
    yield from (states_BPD, *cache.k, *cache.v)


def masks(head: Head, steps: Any, seed: int) -> Iterator[Tensor]:
    """Logits of all guesses of one pass; then what was kept."""
    dice = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(0, 40, (B, S), generator=dice)
    features_BSF = torch.randn(B, S, len(head.config.taps) * D, generator=dice, dtype=torch.float64)
    cache, ends_B = head.new_cache(B, S).draft_view(), torch.tensor([5 + seed, 3])
    cache.lengths.copy_(ends_B - LEAD)
    yield steps.propose(tokens_BS, features_BSF, LEAD, cache, ends_B, 4)
    yield from (*cache.k, *cache.v)


def looks(head: Head, steps: Any, seed: int) -> Iterator[Tensor]:
    """Logits of a first step and of a chain's next guesses, with a target's cache; then what was kept."""
    dice = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(0, 40, (B, S), generator=dice)
    target, cache = head._target[0].new_cache(B, S), head.new_cache(B, S).draft_view()
    head._target[0].forward(tokens_BS[:, :20].contiguous(), target)
    target.lengths.copy_(torch.tensor([5 + seed, 3]))
    cache.lengths.copy_(target.lengths - LEAD)
    yield steps.read(tokens_BS, LEAD, cache, target)
    cache.lengths.copy_(target.lengths)
    for place in (7, 8):
        yield steps.step(tokens_BS[:, place, None], cache, target, None)
        cache.lengths += 1
    yield from (*cache.k, *cache.v)


@torch.inference_mode()
@pytest.mark.parametrize(
    "kind, run",
    [
        ("eagle", partial(feature_steps, trees=False)),
        ("eagle3", partial(feature_steps, trees=True)),
        ("parallel", masks),
        ("glide", looks),
    ],
)
def test_compiled_steps_are_the_heads_own(kind: str, run: Callable[..., Iterator[Tensor]]) -> None:
    """One form for each kind of step: caches and texts of later calls are others."""
    head = random_head(tiny_decoder(3), kind)
    steps = CompiledMethods(head)
    for seed in range(3):
        wanted = [x.clone() for x in run(head, head, seed)]
        if seed:
            with no_recompiles():
                found = [x.clone() for x in run(head, steps, seed)]
        else:
            found = [x.clone() for x in run(head, steps, seed)]
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
