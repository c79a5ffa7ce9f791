"""Records of what each model drafter would draft at every position of a text: input of `benchmark.studies.replay`.

Texts do not depend on drafts, so one record of full drafts at every position holds the outcome of any choice of the
draft policy. Legend: P positions, N tokens of the longest chain, C nodes of a full tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharesd.drafters.base import DraftContext
from sharesd.engine.call_queue import decode
from sharesd.engine.engine import Engine
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_scorer import DraftScorer
from sharesd.speculation.draft_tree import DraftShape, DraftTree, chain


@dataclass(frozen=True, slots=True)
class DraftRecords:
    """Full drafts of one drafter at all roots of one answer.

    `probs` are the drafter's own, before they are calibrated.
    """

    kind: str
    """Kind of the question."""
    prompt: list[int]
    answer: list[int]
    chain_tokens_PN: NDArray[np.int64]
    chain_probs_PN: NDArray[np.float32]
    tree_tokens_PC: NDArray[np.int64]
    tree_probs_PC: NDArray[np.float32]
    tree_parents_PC: NDArray[np.int64]

    def save(self, path: Path) -> None:
        np.savez_compressed(path, **{name: getattr(self, name) for name in self.__dataclass_fields__})

    @classmethod
    def load(cls, path: Path) -> DraftRecords:
        found = np.load(path)
        lists = {"kind": str(found["kind"]), "prompt": found["prompt"].tolist(), "answer": found["answer"].tolist()}
        return cls(**lists, **{name: found[name] for name in cls.__dataclass_fields__ if name not in lists})


def record_drafts(
    runtime: Runtime, mode: str, prompts: Sequence[tuple[str, list[int]]], params: SamplingParams
) -> Iterator[DraftRecords]:
    """Yield a record for each (kind, prompt); a model drafter of the runtime drafts, on a CPU, one row at a time."""
    engine = runtime.engine
    recorder = _Recorder(engine, mode, params)
    for kind, prompt in prompts:
        recorder.drafts = []
        answer = [token for chunk in decode(engine, [prompt], params, mode=mode) for token in chunk.token_ids]
        parts = map(np.array, zip(*recorder.drafts, strict=True))
        yield DraftRecords(kind, prompt, answer, *parts)


class _WholeDrafts(DraftScorer):
    """Lets every draft become as large as asked for."""

    def should_continue(self, depth: int, accept_prob: float | None = None) -> bool:
        return True

    def num_tree_nodes_worth(self, accept_probs: Sequence[float]) -> int:
        return len(accept_probs)


class _Recorder:
    """Makes full drafts in place of a drafter's, and lets every round be a plain step."""

    def __init__(self, engine: Engine, mode: str, params: SamplingParams) -> None:
        policy, drafter = engine.variant(params, mode).policy, engine.modes[mode].drafter
        assert drafter is not None and not drafter.runs_on_host
        self._drafter, self._draft, self._policy = drafter, drafter.draft, policy
        self._tree = policy.shapes[-1]
        self._length = max(shape.depth for shape in drafter.shapes if not shape.is_tree)
        policy.pinned = chain(self._length)
        self.drafts: list[tuple[Any, ...]] = []
        drafter.draft = self.record  # type: ignore[method-assign]

    def record(self, context: DraftContext, shape: DraftShape) -> DraftTree:
        self._policy.scorer = scorer = _WholeDrafts(0.5)
        scorer.begin((0,))
        tokens = self._draft(context, chain(self._length)).tokens[0].tolist()
        chain_probs = list(scorer.draft_probs[0])
        scorer.begin((0,))
        self._draft(context, self._tree)
        self._policy.scorer = None
        self.drafts.append((tokens, chain_probs, *self._nodes(context)))
        return context.buffers.no_draft

    def _nodes(self, context: DraftContext) -> tuple[list[int], list[float], list[int]]:
        """Return tokens, probabilities and parents of all nodes of the last tree."""
        key: Any = next(key for key in context.generators if key in (self._drafter, (self._drafter, 0)))
        tree = context.generators[key].tree
        nodes, branching = tree._nodes, tree._branching
        parents = []
        for node, ancestors in enumerate(nodes.ancestors_BCD[0].tolist()):
            level = 0 if node < branching else 1 + (node - branching) // branching**2
            parents.append(ancestors[level - 1] if level else -1)
        return nodes.tokens_BC[0].tolist(), tree._draft_probs_BC[0].tolist(), parents
