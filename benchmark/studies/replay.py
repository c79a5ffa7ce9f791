"""Replay of recorded drafts on a made machine: what the draft policy chooses, and the time that it takes.

The policy, mixtures and tables are the real ones. Drafts of models come from `benchmark.studies.draft_records`, and
times from a table of costs with noise. So two policies can be compared exactly, in seconds, on any machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmark.studies.draft_records import DraftRecords
from sharesd.drafters.base import Drafter
from sharesd.drafters.tables.proposal import Proposal, pack
from sharesd.engine.request import MAX_LEAD
from sharesd.speculation.cost_model import Costs
from sharesd.speculation.draft_policy import RESTING, Policy
from sharesd.speculation.draft_tree import NO_DRAFT, DraftRecord, DraftShape, DraftTree, chain, parents_of

THREADS = 2
VOCAB_SIZE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Times of rounds: a table of costs, and what disturbs them."""

    costs: Costs
    """Seconds of steps and drafts of one number of rows; of tables, `query` is for one row, eight take twice that."""
    query: float = 0.0
    noise: float = 0.03
    """Spread (of the logarithm) of each time."""
    stalls: float = 0.02
    """Chance that a step or a draft takes 1.5 to 4 times as long."""
    speed: Callable[[int], float] = lambda number: 1.0
    """Factor of all times in a round of this number."""

    def seconds(self, base: float, number: int, dice: random.Random) -> float:
        stall = dice.uniform(1.5, 4.0) if dice.random() < self.stalls else 1.0
        return base * self.speed(number) * exp(dice.gauss(0.0, self.noise)) * stall

    def mean(self, base: float, number: int) -> float:
        """Return the mean of `seconds`."""
        return base * self.speed(number) * exp(self.noise**2 / 2) * (1 + 1.75 * self.stalls)


@dataclass
class Played:
    """What a replay emitted and took, and plain decoding of the same tokens."""

    tokens: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    lengths: list[int] | None = None

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds


class RecordedModel(Drafter):
    """Model drafter that returns recorded drafts at the rows' places."""

    branching = 3

    def __init__(self, name: str, shapes: Sequence[DraftShape], prior: float, read: float = 0.0) -> None:
        """`read`: seconds of reading a token that it missed. The first step of a draft reads a few."""
        self.name, self._read_token_s = name, read
        self.read_s = 0.0
        """What reading took before the last draft."""
        self.shapes, self.trees, self.prior = shapes, shapes[-1].is_tree, prior
        self.records: Mapping[int, DraftRecords] = {}
        """Record of each row."""
        self.rows: Mapping[int, int] = {}
        """Place (emitted tokens - 1) of each row that is alive."""
        self._read: dict[int, int] = {}  # places of the rows' last drafts

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        self._read[row] = 0

    def catch_up(self, texts: Mapping[int, list[int]], *_: Any, **__: Any) -> None:
        missed = (place - self._read.get(row, 0) for row, place in self.rows.items())
        self.read_s = self._read_token_s * sum(num for num in missed if num > self.shapes[-1].nodes)
        self._read |= self.rows

    def draft(self, context: Any, shape: DraftShape) -> DraftTree:
        make = self._tree if shape.is_tree else self._chain
        return make(context.policy.scorer, context, shape)

    def _chain(self, scorer: Any, context: Any, shape: DraftShape) -> DraftTree:
        length = shape.depth
        for num in range(length if scorer else 0):
            if num and not scorer.should_continue(num):
                length = num
                break
            scorer.add_token([float(self._at(row, "chain_probs_PN")[num]) for row in scorer.rows])
        tokens = torch.full((context.end - context.first, length), -1)
        for row in self.rows:
            tokens[row - context.first] = torch.from_numpy(self._at(row, "chain_tokens_PN")[:length].copy())
        return DraftTree(tokens, depth=length, record=DraftRecord(self.name, num_steps=length))

    def _at(self, row: int, part: str) -> Any:
        return getattr(self.records[row], part)[self.rows[row]]

    def _tree(self, scorer: Any, context: Any, shape: DraftShape) -> DraftTree:
        levels, branching = 0, self.branching
        grown = {
            row: _GrownTree(self._at(row, "tree_tokens_PC"), self._at(row, "tree_parents_PC")) for row in self.rows
        }
        for row, tree in grown.items():
            raw = self._at(row, "tree_probs_PC")
            tree.raw = raw.tolist()
            known = scorer.calibration.calibrated_probs if scorer else None
            middles = [0.0, *((number + 0.5) / 10 for number in range(10))]
            tree.probs = raw.tolist() if known is None else np.interp(raw, middles, known).tolist()
        while levels < shape.depth:
            if levels and scorer:
                mean = sum(grown[row].reached() for row in scorer.rows) / len(scorer.rows)
                if not scorer.should_continue(levels, mean):
                    break
            for tree in grown.values():
                tree.grow(branching)
            levels += 1
        num = min(shape.nodes, branching + (levels - 1) * branching**2)
        if scorer:
            best = {row: grown[row].best(num) for row in scorer.rows}
            counted = list(best.values())
            by_node = zip(*(scores for _, _, scores, _ in counted), strict=True)
            num = scorer.num_tree_nodes_worth([sum(node) / len(node) for node in by_node])
            scorer.set_tree([raw[:num] for _, _, _, raw in counted], [parents[:num] for _, parents, _, _ in counted])
        rows = []
        for row in range(context.first, context.end):
            tokens, parents, scores, _ = grown[row].best(num) if row in grown else ([], [], [], [])
            rows.append(Proposal(tokens, parents, scores))
        packed = pack(rows, num, self.name)
        return packed._replace(record=DraftRecord(self.name, num_steps=levels), depth=levels)


class _GrownTree:
    """A recorded tree, expanded level by level with calibrated probabilities."""

    def __init__(self, tokens: Any, parents: Any) -> None:
        self.tokens, self.parents = tokens.tolist(), parents.tolist()
        self.raw: list[float] = []
        self.probs: list[float] = []
        self.scores: dict[int, float] = {}
        self.frontier = [-1]

    def grow(self, branching: int) -> None:
        children = [node for node, parent in enumerate(self.parents) if parent in self.frontier]
        for node in children:
            above = self.scores[self.parents[node]] if self.parents[node] >= 0 else 1.0
            self.scores[node] = above * self.probs[node]
        self.frontier = sorted(children, key=lambda node: -self.scores[node])[:branching]

    def reached(self) -> float:
        return sum(self.scores[node] for node in self.frontier)

    def best(self, num: int) -> tuple[list[int], list[int], list[float], list[float]]:
        """Return tokens, parents, path and raw probabilities of the best nodes, padded to `num`."""
        nodes = sorted(self.scores, key=lambda node: (-self.scores[node], node))[:num]
        index = {node: at for at, node in enumerate(nodes)} | {-1: -1}
        pad = num - len(nodes)
        return (
            [self.tokens[node] for node in nodes] + [-1] * pad,
            [index[self.parents[node]] for node in nodes] + [-1] * pad,
            [self.scores[node] for node in nodes] + [0.0] * pad,
            [self.raw[node] for node in nodes] + [0.0] * pad,
        )


def accepted_path(tokens: Sequence[int], parents: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Return the verify rows, from 1, of the draft's nodes that an answer goes through."""
    path, at = list[int](), -1
    for token in answer:
        found = next((n for n, (t, p) in enumerate(zip(tokens, parents, strict=True)) if p == at and t == token), None)
        if found is None:
            break
        path.append(found + 1)
        at = found
    return path


def play(
    policy: Policy,
    drafter: Drafter,
    records: Sequence[Mapping[str, DraftRecords]],
    machine: Machine,
    *,
    dice: random.Random,
    played: Played | None = None,
) -> Played:
    """Decode answers together, as rows of one call; the policy keeps what it has learned before.

    `records`: of each row, by model drafter.
    """
    found = played or Played()
    answers = {row: next(iter(of_models.values())) for row, of_models in enumerate(records)}
    texts = {row: record.prompt + record.answer[:1] for row, record in answers.items()}
    for model in drafter.models:
        assert isinstance(model, RecordedModel)
        model.records = {row: of_models[model.name] for row, of_models in enumerate(records)}
    places = dict.fromkeys(texts, 0)
    policy.end_rest()
    for row, text in texts.items():
        drafter.begin(row, list(text[:-1]), False)
        policy.begin()
    buffers = SimpleNamespace(no_draft=DraftTree(torch.empty(len(records), 0, dtype=torch.int64)))
    sampler = SimpleNamespace(needs_draft_probs=False, vocab_size=VOCAB_SIZE)
    context = SimpleNamespace(first=0, end=len(records), policy=policy, sampler=sampler, graphs=None, buffers=buffers)
    while places:
        number = found.rounds
        fewest = min(places.values())
        counted = [row for row, place in places.items() if place <= fewest + MAX_LEAD]
        slots = sum(len(text) for text in texts.values()) / len(records)
        policy.counted_rows, policy.reasons = counted, {}
        policy.live.at(slots, THREADS, len(records))
        for model in drafter.models:
            model.rows = places  # type: ignore[attr-defined]
        alive = {row: texts[row] for row in places}
        tree, rests, shape = buffers.no_draft, policy.rests(), NO_DRAFT
        if not rests:
            shape = chain(policy.max_nodes()) if drafter.runs_on_host else policy.next_shape()
        if shape.nodes:
            drafter.catch_up(alive, False)
            tree = drafter.draft(context, shape)  # type: ignore[arg-type]
        base = machine.costs.of_draft(policy.shape_of(tree), slots)
        base += sum(model.read_s for model in drafter.models if model.name == tree.record.drafter)  # type: ignore[attr-defined]
        decision = RESTING if rests else policy.decision(is_plain=not tree.tokens.shape[1])
        base += machine.query * (7 + len(places)) / 8 * decision.has_queried
        draft_s = machine.seconds(base, number, dice)
        step_s = machine.seconds(machine.costs.of_step(1 + tree.tokens.shape[1], slots), number, dice)
        paths, progress, emitted = [], {}, {}
        tokens, parents = tree.tokens.tolist(), parents_of(tree).tolist()
        for row, place in places.items():
            answer = answers[row].answer
            path = accepted_path(tokens[row], parents[row], answer[place + 1 :])
            progress[row] = len(path) + 1
            emitted[row] = answer[place + 1 : place + 2 + len(path)]
            if row in counted:
                paths.append(path)
        before = min(places.values())
        for row, new in emitted.items():
            places[row] += len(new)
            texts[row] += new
        still = [row for row in places if places[row] < len(answers[row].answer) - 1] or list(places)
        advance = min(places[row] for row in still) - before
        found.rounds += 1
        found.tokens += sum(map(len, emitted.values()))
        found.seconds += draft_s + step_s
        found.drafted += tree.tokens.shape[1]
        if found.lengths is not None:
            found.lengths.append(tree.tokens.shape[1])
        policy.record(decision, tree, paths, draft_s, step_s, advance)
        # Plain decoding takes a step for each token of the row that is furthest behind.
        found.plain_seconds += machine.mean(machine.costs.of_step(1, slots), number) * advance
        places = {row: place for row, place in places.items() if place < len(answers[row].answer) - 1}
    return found
