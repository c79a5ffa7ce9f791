"""Modes classic and hybrid: with another padding of the vocabulary, and in which order the parts of a draft are made.

A second model reads what it missed in chunks of one size, which are captured; the outcome is as without.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile.attention import MAX_STEP
from sharesd import SamplingParams
from sharesd.config import EngineConfig
from sharesd.drafters.classic.drafter import ClassicDrafter
from sharesd.drafters.hybrid.drafter import HybridDrafter
from sharesd.drafters.tables.proposal import Proposal
from sharesd.models.tokenizer import load_tokenizer
from sharesd.runtime import Runtime
from sharesd.speculation.draft_buffers import KEPT
from sharesd.speculation.draft_policy import Policy
from sharesd.speculation.draft_tree import NO_DRAFT, DraftRecord, DraftShape, DraftTree, chain, chains, parents_of
from tests.cases.inputs import llama
from tests.helpers.after_warmup import no_captures
from tests.helpers.in_mode import in_mode
from tests.helpers.made_costs import made_costs
from tests.helpers.oracle import tiny_decoder
from tests.helpers.recorded_graphs import RecordedGraphs, take_the_way_of_cuda

TARGET, SMALLER, LARGER = 640, 384, 704


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets and drafts of the same weights."""
    folder = tmp_path_factory.mktemp("padding")
    for vocab in (TARGET, SMALLER, LARGER):
        llama(folder / str(vocab), vocab=vocab, seed=31)
    return folder


def runtime(folder: Path, vocab: int, **options: Any) -> Runtime:
    target, draft = str(folder / str(TARGET)), str(folder / str(vocab))
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_context": 128, "max_batch": 2}
    config = EngineConfig(target=target, draft=draft, **given, **options)
    return Runtime(config, ("naive", "classic"))


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "hot": {"temperature": 3.0, "seed": 2},
    "truncated": {"temperature": 3.0, "top_p": 0.99, "repetition_penalty": 1.2, "seed": 3},
    "rejection": {"temperature": 3.0, "seed": 4, "acceptance": "rejection"},
    "block": {"temperature": 3.0, "seed": 5, "acceptance": "block"},
}


@pytest.mark.parametrize("vocab", [SMALLER, LARGER])
@pytest.mark.parametrize("options", [{"num_draft": 3}, {"tree": (3, 3, 8), "num_draft": 8}], ids=str)
def test_texts_are_those_of_naive(folder: Path, vocab: int, options: dict[str, Any]) -> None:
    """With a hot target that emits ids that the smaller model does not have, and a prompt of such ids."""
    loaded = runtime(folder, vocab, **options)
    naive, classic = in_mode(loaded, "naive"), in_mode(loaded, "classic")
    prompts = [loaded.tokenizer.encode("the old tree"), [5, TARGET - 1, SMALLER, 7]]
    drafted: set[int] = set()
    commit = classic.drafter.commit  # type: ignore[union-attr]

    def noted(context: Any, tree: Any, *rest: Any) -> Any:
        drafted.update(tree.tokens.flatten().tolist())
        return commit(context, tree, *rest)

    classic.drafter.commit = noted  # type: ignore[union-attr, method-assign]
    for name, sampling in SAMPLING.items():
        if "acceptance" in sampling and "tree" in options:
            continue
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, **sampling)
        found = classic.generate(prompts, params)
        if name in ("greedy", "hot", "truncated"):
            wanted = naive.generate(prompts, params)
            assert [done.token_ids for done in found] == [done.token_ids for done in wanted]
        if name == "greedy" and "tree" not in options:
            sources = [source for done in found for source in done.sources[1:]]
            assert sources.count("recovered") <= 2, "the same model guesses right"
        elif name == "hot":
            assert any(token >= SMALLER for done in found for token in done.token_ids)
    assert drafted and max(drafted) < min(vocab, TARGET)
    loaded.close()


def test_another_tokenizer_of_the_same_size_is_refused(folder: Path, tmp_path: Path) -> None:
    other = llama(tmp_path / str(SMALLER), vocab=SMALLER, seed=31)
    said = json.loads((other / "tokenizer.json").read_text())
    ids = said["model"]["vocab"]
    ids["Ġmoon"], ids["Ġgreen"] = ids["Ġgreen"], ids["Ġmoon"]
    (other / "tokenizer.json").write_text(json.dumps(said))
    assert load_tokenizer(other).vocab_size == load_tokenizer(folder / str(TARGET)).vocab_size
    with pytest.raises(ValueError, match="another vocabulary"):
        Runtime(EngineConfig(target=str(folder / str(TARGET)), draft=str(other), device="cpu"), ("classic",))


SLOTS = 4 * MAX_STEP


def drafter(graphs: Any) -> ClassicDrafter:
    """A drafter of two rows, whose second has read a short prompt."""
    found = ClassicDrafter(tiny_decoder(1), batch=2, slots=SLOTS, shapes=chains(4), weight_bytes=0, graphs=graphs)
    found.begin(1, [3, 4, 5], False)
    found.read(1, [3, 4, 5])
    return found


@pytest.mark.parametrize("missed", [1, 5, MAX_STEP, 2 * MAX_STEP + 7, SLOTS - 4])
def test_missed_tokens_are_read_by_replays(missed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    take_the_way_of_cuda(monkeypatch)
    graphs = RecordedGraphs()
    eager, captured = drafter(None), drafter(graphs)
    for num in (1, 2):  # a plain call, and the capture
        captured.catch_up({1: [3, 4, 5, *[6] * (1 + num)]}, idle=True)
    captured.begin(1, [3, 4, 5], False)
    captured.read(1, [3, 4, 5])
    text = [3, 4, 5, *(7 + i % 20 for i in range(missed)), 1]
    eager.catch_up({1: text}, idle=True)
    before = graphs.num_replays
    with no_captures():
        captured.catch_up({1: text}, idle=True)
    assert graphs.num_replays - before == -(-missed // MAX_STEP) and len(graphs.recorded) == 1
    assert captured.cache.cached_ids[1] == eager.cache.cached_ids[1] == text[:-1]
    assert captured.cache.lengths.tolist() == eager.cache.lengths.tolist() == [1, len(text) - 1]
    assert captured._before_B.tolist() == eager._before_B.tolist() == [0, text[-2]]
    for ours, theirs in zip((*captured.cache.k, *captured.cache.v), (*eager.cache.k, *eager.cache.v), strict=True):
        ours, theirs = (part[1, :, : len(text) - 1] for part in (ours, theirs))
        torch.testing.assert_close(ours, theirs)


FOUR = chain(4)._replace(drafter="model")


class Recorded:
    """A table and a model that note when they are asked, and a policy that takes the shapes which it is given."""

    def __init__(self, shapes: list[DraftShape], *, score: float = 0.0, graphs: object = object()) -> None:
        """`score`: probability that each node of the table holds after the one before it; 0: it finds nothing."""
        self.shapes, self.events, self.score = shapes, [], score
        costs = made_costs({1: 1.0, 9: 1.1}, 0.3, 0.3, drafters=["model"], step_slot={1: 0.0, 9: 0.0})
        self.policy = Policy([each._replace(drafter="model") for each in chains(8)], costs=costs)
        self.policy.gate.gain, self.policy.gate.seconds, self.policy.live._now.suspicion = 1.0, 0.05, 0.0
        self.policy.next_shape = lambda *_, **__: self.shapes.pop(0)  # type: ignore[method-assign]
        table: Any = SimpleNamespace(name="table", num_successors=0, propose=self.propose, extend=lambda *_: None)
        said = {"name": "model", "shapes": chains(8), "prior": 0.5, "runs_on_host": False}
        said |= {
            "supports_async": True,
            "needs_catch_up": False,
            "commits_plain_rounds": False,
        }
        model: Any = SimpleNamespace(**said, catch_up=lambda *_, **__: None, draft=self.draft)
        self.drafter = HybridDrafter("hybrid", [table], model, num_nodes=8, trees=True)
        self.drafter._known[0] = 1
        given = {"first": 0, "end": 1, "graphs": graphs}
        given |= {"buffers": SimpleNamespace(no_draft=DraftTree(torch.empty(1, 0, dtype=torch.int64)))}
        sampler = SimpleNamespace(needs_draft_probs=False, vocab_size=99, kind=SimpleNamespace(constrained=False))
        clock = SimpleNamespace(mark=lambda: float(len(self.events)))
        self.context: Any = SimpleNamespace(**given, policy=self.policy, sampler=sampler, clock=clock)

    def propose(self, row: int, num: int) -> Proposal:
        self.events.append("asked")
        num = num if self.score else 0
        return Proposal([5] * num, list(range(-1, num - 1)), [self.score ** (1 + node) for node in range(num)])

    def draft(self, context: Any, shape: DraftShape) -> DraftTree:
        self.events.append("launched")
        tokens_BN = torch.zeros(1, shape.nodes, dtype=torch.int64)
        return DraftTree(tokens_BN, depth=shape.depth, record=DraftRecord(num_steps=shape.depth))

    def round(self, *, begun: bool = False, waited: float = 0.0) -> list[str]:
        """Events of a round.

        `begun`: the device verifies by the time that the last round is read. `waited`: seconds of the device.
        """
        self.events.clear()
        goes_ahead = self.drafter.goes_ahead(self.context)
        self.events.append("read" if not goes_ahead else "not read")
        self.drafter.catch_up({0: [1]}, False)
        self.tree = tree = self.drafter.draft(self.context, chain(8))
        if tree.record.num_steps and self.context.graphs is not None:
            at = float(self.events.index("launched"))
            assert tree.record.model_marks == (at, at + 1.0), "what is between them is the model's draft alone"
        self.late = None
        assert tree.record.takes_late_nodes == goes_ahead
        if goes_ahead:
            self.events.append("read")
            self.late = self.drafter.late_nodes(self.context, {0: [1]}, tree, lambda: begun)
        decision = self.policy.decision()
        assert decision.has_queried
        draft_s = 1.5 if tree.record.num_steps else 0.0
        self.policy.record(decision, self.late or tree, [[]], draft_s, 1.1, 1, waited)
        self.policy.gate.gain = 1.0
        return list(self.events)


FIRST, AHEAD = ["read", "asked", "launched"], ["not read", "launched", "read", "asked"]


def test_a_round_is_launched_as_if_there_were_no_tables_while_the_model_drafts() -> None:
    """Where text would depend on their nodes, or masks of grammars do, tables come first."""
    recorded = Recorded([FOUR, FOUR, FOUR, NO_DRAFT, FOUR, FOUR, FOUR, FOUR])
    assert recorded.round() == FIRST, "there was no draft yet"
    assert recorded.round() == AHEAD and recorded.late is None, "they have found nothing"
    assert recorded.round(begun=True) == AHEAD[:-1], "they are not asked for what would come too late"
    recorded.policy.gate.last_model_draft = NO_DRAFT
    assert recorded.round() == FIRST[:-1] and recorded.drafter._idle == {"model": 1}
    assert recorded.round() == FIRST, "the last round had none"
    for place, name in (
        (recorded.context.sampler, "needs_draft_probs"),
        (recorded.context.sampler.kind, "constrained"),
    ):
        setattr(place, name, True)
        assert recorded.round() == FIRST
        setattr(place, name, False)
    assert recorded.round() == AHEAD


def test_nodes_of_tables_come_next_to_the_draft_whatever_it_is() -> None:
    recorded = Recorded([FOUR] * 2, score=0.5)
    recorded.round()
    recorded.round()
    late = recorded.late
    assert late is not None and late.tokens.tolist() == [[KEPT] * 4 + [5] * 4]
    assert parents_of(late).tolist() == [[-1, 0, 1, 2, -1, 4, 5, 6]] and late.depth == 4
    assert (late.record.num_steps, late.record.num_filled, late.record.filler) == (4, 4, "table")
    recorded.policy.gate.gain = 0.0
    decision = recorded.policy.decision()._replace(has_queried=True)
    for _ in range(400):
        recorded.policy.record(decision, late, [[1, 5, 6]], 1.2, 1.1, 4, 0.0)
    assert recorded.policy.gate.gain == pytest.approx(2.0, rel=0.01), "what came of them"


def test_tables_come_first_where_they_make_a_dear_draft_needless() -> None:
    """And the model again once they find nothing; not if the device then waits for longer than the draft takes."""
    recorded = Recorded([FOUR, FOUR, NO_DRAFT, FOUR, FOUR, FOUR], score=0.98)
    recorded.round(waited=0.2)
    assert recorded.round() == AHEAD
    assert recorded.round(waited=0.2) == FIRST[:-1] and recorded.tree.tokens.shape[1] > 4
    recorded.score = 0.0
    assert [recorded.round(waited=0.2) for _ in range(2)] == [FIRST, AHEAD]
    recorded = Recorded([FOUR] * 40, score=0.98)
    gate = recorded.policy.gate
    for seconds, launched_before in ((9.0, False), (9.0, False), (0.0, True)):
        gate.record_seconds(seconds, launched_before)
    assert gate.seconds == gate.wait_if_first == 9.0
    gate.last_model_draft = FOUR
    gate.record_seconds(9.0)
    assert gate.seconds == 0.0, "what the coming round waits"
    assert all(recorded.round() == AHEAD for _ in range(20))


def test_tables_come_first_where_drafts_are_not_replayed() -> None:
    recorded = Recorded([FOUR] * 2, graphs=None)
    recorded.round()
    assert recorded.round() == FIRST
