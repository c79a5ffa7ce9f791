"""Drafter of a checkpoint's layer for multi-token prediction, which also finds out which hidden states go in.

Its cache is that of an EAGLE head: see `sharesd.drafters.eagle.drafter`. Legend: T places, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch

from sharesd.drafters.base import NOTHING, BuildInputs
from sharesd.drafters.eagle.drafter import EagleDrafter, build_head_drafter
from sharesd.drafters.mtp.head import MTP

log = logging.getLogger(__name__)

NUM_TRIED = 64
"""Decoded tokens by which the states are chosen."""
_AT_ONCE, _BEFORE = 16, 64
"""Tokens that are predicted in one trial, and places before them that the layer then attends to."""


class MTPDrafter(EagleDrafter):
    """Drafter of the layer.

    Until NUM_TRIED tokens of answers are known, it drafts from states behind the norm. Then it uses those which gave
    these tokens the larger probabilities, and keeps that choice for later starts.
    """

    name = "mtp"
    head: MTP

    def __init__(self, head: Any, *inputs: Any, **options: Any) -> None:
        super().__init__(head, *inputs, **options)
        self._tried: dict[int, int] = {}  # of each row: tokens of its text that need no trial, the prompt's included
        self._tries = False  # before the first `forget`, which ends the warm-up
        self._num_tried = 0
        self._scores = {False: 0.0, True: 0.0}  # by `is_before`

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        super().begin(row, tokens, reuse)
        self._tried[row] = len(tokens)

    def forget(self) -> None:
        super().forget()
        self._tries, self._num_tried, self._scores = True, 0, dict.fromkeys(self._scores, 0.0)

    def catch_up(
        self,
        texts: Mapping[int, list[int]],
        idle: bool,
        plain: Collection[int] = (),
        coming: Mapping[int, int] = NOTHING,
    ) -> None:
        if self._tries and not self.head.is_chosen:
            for row, text in texts.items():
                if len(text) - self._tried[row] >= _AT_ONCE and self._num_tried < NUM_TRIED:
                    self._try(row, text)
            if self._num_tried >= NUM_TRIED:
                self._choose()
        super().catch_up(texts, idle, plain, coming)

    @torch.inference_mode()
    def _try(self, row: int, text: list[int]) -> None:
        """Add up the probabilities of a row's last tokens, from either kind of states."""
        assert self._target.features is not None
        num = min(len(text) - self._tried[row], _AT_ONCE)
        first = max(0, len(text) - 2 - num - _BEFORE)
        features_1TD = self._target.features[row : row + 1, first : len(text) - 2]
        tokens_1T = torch.tensor([text[first + 1 :]], device=features_1TD.device)
        for is_before in self._scores:
            self.head.use_states_before_norm(is_before)
            cache = self.head.new_cache(1, features_1TD.shape[1])
            states_1TD = self.head(tokens_1T[:, :-1], self.head.fuse(features_1TD), cache)
            logits_1TV = self.head.draft_logits(states_1TD[:, -num:])
            probs_1T = logits_1TV.float().softmax(-1).gather(2, tokens_1T[:, -num:, None])
            self._scores[is_before] += float(probs_1T.sum())
        self.head.use_states_before_norm(False)
        self._tried[row] = len(text)
        self._num_tried += num

    def _choose(self) -> None:
        is_before = self._scores[True] > self._scores[False]
        self.head.is_chosen = True
        self.head.choice.keep(is_before)
        behind, before = (self._scores[key] / self._num_tried for key in (False, True))
        log.info(
            "mode %s: states %s the last norm go in (mean probability of a token %.2f, with others %.2f)",
            *(self.name, "before" if is_before else "behind", max(behind, before), min(behind, before)),
        )
        if is_before:
            self.head.use_states_before_norm(True)
            self.cache.forget()  # whose keys and values are of other states
            self._in_flight.clear()


def build(inputs: BuildInputs) -> EagleDrafter:
    return build_head_drafter(MTPDrafter, inputs)
