"""Trees that grow on while they are verified: what is kept of them, and the text, which is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from compile.tree_expand import expand_tree
from offload.prefetcher import Prefetcher
from quant.config import QuantConfig
from sharesd.config import EngineConfig, Mode
from sharesd.drafters.async_tree_draft import AsyncTreeDraft, replant
from sharesd.drafters.share.drafter import ShareDrafter
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_tree import DraftShape, DraftTree, shapes_of
from tests.drafters.test_tree_draft import new_tree
from tests.helpers.in_mode import in_mode
from tests.helpers.offloaded import WAYS, spill
from tests.helpers.oracle import logits_of, new_engine, switched, tiny_decoder

pytestmark = pytest.mark.usefixtures("own_cache")

TOP, LEVELS = 2, 9
PROMPTS: list[str | list[int]] = ["the cat sat on the mat and the cat sat on the", [7, 9], [5, 6, 7] * 20]
PENALIZED = SamplingParams(max_new_tokens=16, temperature=0.8, seed=5, repetition_penalty=1.3, ignore_eos=True)


def level_of(node: int) -> int:
    return 0 if node < TOP else (node - TOP) // TOP**2 + 1


class Grown:
    """A tree of one row that grows by tokens and probabilities of chance."""

    def __init__(self, seed: int) -> None:
        self._dice = torch.Generator().manual_seed(seed)
        self.level_B, self.nodes, self.frontier = new_tree(TOP, LEVELS, B=1)
        self.draft_probs_BC = torch.rand(self.nodes.scores_BC.shape, generator=self._dice)

    def expand_tree(self) -> None:
        num = TOP if int(self.level_B) else 1
        tokens = torch.randint(1000, (1, num, TOP), generator=self._dice)
        logp = torch.rand(1, num, TOP, generator=self._dice).log()
        expand_tree(self.level_B, self.nodes, self.frontier, tokens, logp)

    def paths(self) -> dict[tuple[int, ...], tuple[float, int | None, float]]:
        """By the tokens down to a node: its score, where it was read, and what is said of it."""
        tokens, scores, ancestors, kv_slots = (part[0] for part in self.nodes)
        return {
            tuple(tokens[ancestors[node, : level + 1]].tolist()): (
                float(scores[node]),
                int(kv_slots[node]) if kv_slots[node] < (LEVELS - 1) * TOP else None,
                float(self.draft_probs_BC[0, node]),
            )
            for node, level in enumerate(map(level_of, range(len(tokens))))
            if scores[node] > -torch.inf
        }

    def fronts(self) -> dict[tuple[int, ...], tuple[float, list[int]]]:
        """By the tokens down to a node that is expanded next: its score, and the slots of its path."""
        _, scores, paths, places, depths = (part[0] for part in self.frontier)
        num = int(depths[0]) + 1
        return {
            tuple(self.nodes.tokens_BC[0, path[:num]].tolist()): (float(score), slots[:num].tolist())
            for path, slots, score in zip(paths, places, scores, strict=True)
            if score > -torch.inf
        }


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("level", [1, 2, 4])
def test_what_lies_behind_a_node_becomes_a_tree_of_its_own_that_grows_on(seed: int, level: int) -> None:
    grown = Grown(seed)
    for _ in range(6):
        grown.expand_tree()
    root = int(grown.frontier.paths_BkD[0, seed % TOP, level])
    kv_offset = tuple(grown.nodes.tokens_BC[0, grown.nodes.ancestors_BCD[0, root, : level + 1]].tolist())
    score, up = float(grown.nodes.scores_BC[0, root]), level + 1
    behind = {
        path[up:]: (each - score, None if place is None else place - up * TOP, said)
        for path, (each, place, said) in grown.paths().items()
        if path[:up] == kv_offset and len(path) > up
    }
    fronts = {
        path[up:]: (each - score, [slot - up * TOP for slot in slots[up:]])
        for path, (each, slots) in grown.fronts().items()
        if path[:up] == kv_offset
    }
    replant(grown.nodes, grown.frontier, grown.draft_probs_BC, TOP, level, root)
    grown.level_B -= up
    assert behind and fronts
    found, found_fronts = grown.paths(), grown.fronts()
    assert {path: values[1:] for path, values in found.items()} == {p: values[1:] for p, values in behind.items()}
    assert {path: slots for path, (_, slots) in found_fronts.items()} == {p: slots for p, (_, slots) in fronts.items()}
    for ours, theirs in ((found, behind), (found_fronts, fronts)):
        assert [values[0] for values in ours.values()] == pytest.approx([theirs[path][0] for path in ours])
    grown.expand_tree()
    new = {path: values for path, values in grown.paths().items() if path not in found}
    assert {path[:-1] for path in new} == set(fronts) and len(new) == TOP * len(fronts)


def test_what_is_kept_is_what_the_model_says_behind_the_new_root(monkeypatch: pytest.MonkeyPatch) -> None:
    model, switch = switched(tiny_decoder(4))
    cache = model.new_cache(1, 200)
    shapes = shapes_of(TOP, 3, 6)
    drafter = ShareDrafter(model, cache, switch, shapes=shapes, quantized_bytes=0, branching=TOP, continues_trees=True)

    @contextmanager
    def overlap_hook(work: Callable[[], bool] | None) -> Iterator[None]:
        while work is not None and work():
            pass
        yield

    engine = new_engine(model, drafter, cache=cache, overlap_hook=overlap_hook)
    draft, num_kept = AsyncTreeDraft.draft, 0

    def checked(self: AsyncTreeDraft, shape: DraftShape) -> DraftTree:
        nonlocal num_kept
        tree, nodes = draft(self, shape), self._nodes
        num_kept += tree.record.drafted_ahead
        for node in (nodes.scores_BC[0] > -torch.inf).nonzero()[:, 0].tolist():
            path = nodes.tokens_BC[0, nodes.ancestors_BCD[0, node, : level_of(node) + 1]].tolist()
            logp = logits_of(model, [*request.tokens, *path]).log_softmax(-1)
            said = sum(float(logp[len(request.tokens) - 1 + i, token]) for i, token in enumerate(path))
            assert float(nodes.scores_BC[0, node]) == pytest.approx(said, abs=1e-4)
        return tree

    monkeypatch.setattr(AsyncTreeDraft, "draft", checked)
    request = engine.add([3, 17, 9], SamplingParams(max_new_tokens=40, ignore_eos=True))
    while request.finish_reason is None:
        engine.step()
    assert num_kept > 5, "what is kept grows on, too"


@pytest.mark.parametrize(
    ("mode", "options", "blocks"),
    [
        ("share", {}, (0, 1, 2, 3, 4)),
        ("share", {"dtype": "bfloat16"}, (1, 3)),
        ("share", {"compile": "off"}, (0, 2, 3)),
        ("share", {"num_draft": None, "max_draft": 8}, (1, 2)),
        ("share", {"max_batch": 3}, (1, 2)),
        ("hybrid", {}, (1, 2)),
    ],
)
def test_texts_are_those_of_weights_that_stay_while_drafts_are_kept(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    close_after: list[Runtime],
    monkeypatch: pytest.MonkeyPatch,
    mode: Mode,
    options: dict[str, Any],
    blocks: tuple[int, ...],
) -> None:
    drafts: list[DraftTree] = []
    draft = AsyncTreeDraft.draft

    def noted(self: AsyncTreeDraft, shape: DraftShape) -> DraftTree:
        drafts.append(draft(self, shape))
        return drafts[-1]

    def always(self: Prefetcher, *_: object) -> None:
        """Two pieces of other work before each block, however soon that is there."""
        if self._overlap_work is not None and self._overlap_work():
            self._overlap_work()

    monkeypatch.setattr(AsyncTreeDraft, "draft", noted)
    monkeypatch.setattr(Prefetcher, "_use_the_wait", always)
    target = str(checkpoint(layers=5, context=1024))
    given = {"target": target, "device": "cpu", "dtype": "float32", "max_context": 256, "max_batch": 1}
    tree = {"num_draft": 6, "tree": (2, 3, 6)}
    config = EngineConfig(**{**given, **tree, "quant": QuantConfig(bits=8, head_bits=8), **options})
    modes: tuple[Mode, ...] = ("naive", mode)
    streamed = Runtime(config, modes, offload=lambda decoder: spill(decoder, blocks, tmp_path / "records"))
    close_after.append(streamed)
    for way in (*WAYS, PENALIZED):
        wanted = in_mode(streamed, "naive", warm=way).generate(PROMPTS, way)
        found = in_mode(streamed, mode, warm=way).generate(PROMPTS, way)
        assert [done.token_ids for done in found] == [done.token_ids for done in wanted]
    if "num_draft" not in options and config.max_batch == 1:  # else the policy's clock, or the other rows, decide
        assert any(tree.record.drafted_ahead for tree in drafts)
