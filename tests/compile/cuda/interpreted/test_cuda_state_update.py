"""What rounds and drafts note down on CUDA: the kernels under Triton's interpreter, against tensor operations."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor

from compile import state_update, tree_expand
from compile.tree_expand import ExpandedDraft, Frontier, Nodes
from sharesd.drafters.tables.proposal import Proposal, pack
from sharesd.sampling.acceptance import accept_match
from sharesd.speculation import draft_buffers
from sharesd.speculation.draft_buffers import KEPT, DraftBuffers

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda import state_update as update_kernels
from compile.cuda import tree_expand as expand_kernels
from compile.cuda.tree_verify import accept_path


def numbers(*shape: int, most: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def test_tokens_of_a_step_and_a_chains_next_token() -> None:
    root, draft = numbers(3), (numbers(3, 5, most=9) - 1)[:, :3]
    for width, tokens in product((4, 7), (draft, draft[:, :0])):
        want = state_update.verify_tokens(root, tokens, width)
        assert torch.equal(update_kernels.verify_tokens(root, tokens, width), want) and want.shape == (3, width)
    found = []
    for note in (state_update.write_draft_token, update_kernels.write_draft_token):
        last, draft = torch.zeros(3, 1, dtype=torch.int64), torch.full((3, 6), -1)
        note(torch.tensor([7, 8, 9]), torch.tensor([5, 6, 9]), torch.tensor([4, 4, 4]), last, draft[:, :5])
        found.append((last, draft))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def paths_of(tokens: list[int], depth: list[int], path: list[list[int]]) -> set[tuple[int, ...]]:
    """Tokens from the root to each node of a row's draft; numbers of rows grow along a path, and siblings differ."""
    found: set[tuple[int, ...]] = set()
    for row, token in enumerate(tokens, 1):
        rows = path[row][: depth[row] + 1]
        assert rows[0] == 0 and rows[-1] == row and rows == sorted(set(rows))
        if token >= 0:
            words = tuple(tokens[each - 1] for each in rows[1:])
            assert words not in found and min(words) >= 0
            found.add(words)
    return found


def random_tree(dice: random.Random, num: int) -> Proposal:
    tokens, parents = list[int](), list[int]()
    while len(tokens) < num:
        node = dice.randint(-1, len(tokens) - 1), dice.randint(0, 2)
        if node not in zip(parents, tokens, strict=True):
            parents.append(node[0]), tokens.append(node[1])
    return Proposal(tokens, parents, [0.0] * num)


@pytest.mark.parametrize("join", ["join_late_nodes", "the kernel"])
def test_late_nodes_join_a_draft_whole_and_once(join: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They bring all their paths and take none of the draft's, whatever both have in common."""
    if join == "the kernel":
        monkeypatch.setattr(draft_buffers, "join_late_nodes", update_kernels.join_late_nodes)
    dice, (B, N) = random.Random(3), (3, 8)
    buffers = DraftBuffers(B, N, 99, torch.device("cpu"))
    late = buffers.late
    for case in range(30):
        num = dice.randint(1, N - 1)
        chain = case % 2 == 0
        drafts = [random_tree(dice, num) for _ in range(B)]
        if chain:
            drafts = [draft._replace(parents=list(range(-1, num - 1))) for draft in drafts]
        buffers.put(pack(drafts, num, ""))
        before = [part.clone() for part in (buffers.tokens_BN, buffers.depth_BT, buffers.path_BTT)]
        added = [random_tree(dice, dice.randint(0, N - num)) for _ in range(B)]
        added[case % B] = random_tree(dice, N - num)
        kept, below = [KEPT] * num, list(range(-1, num - 1))
        both = [
            Proposal(kept + one.tokens, [*below, *(at + num if at >= 0 else -1 for at in one.parents)], [])
            for one in added
        ]
        late.number += 1
        fate = case % 5
        if fate != 3:
            late.put(late.number + (fate == 4), pack(both, N, ""))  # 4: for a round to come
        if fate == 2:  # a word has not come yet
            late._words_BX[1, dice.randrange(late._words_BX.shape[1])] -= 1 << 32
        late.join()
        now = buffers.tokens_BN, buffers.depth_BT, buffers.path_BTT
        joins = [fate < 3 and not (fate == 2 and row == 1) for row in range(B)]
        assert late.joined_B.tolist() == joins
        for row in range(B):
            had, has = (paths_of(*(part[row].tolist() for part in parts)) for parts in (before, now))
            want = paths_of(added[row].tokens, *_depths_and_paths(added[row])) if joins[row] else set()
            assert has == had | want
            assert torch.equal(now[0][row, :num], before[0][row, :num])
            if not joins[row]:
                assert all(torch.equal(a[row], b[row]) for a, b in zip(now, before, strict=True))
        if fate == 4:
            late.number += 1
            late._on_host_BX.zero_()  # nothing more comes for it
            late.join()


def _depths_and_paths(proposal: Proposal) -> tuple[list[int], list[list[int]]]:
    paths = [[0]]
    for row, parent in enumerate(proposal.parents, 1):
        paths.append([*paths[parent + 1], row])
    return [len(path) - 1 for path in paths], paths


@pytest.mark.parametrize("parts", [(), ("path",), ("told",), ("path", "told")], ids="+".join)
def test_what_a_round_decided(parts: tuple[str, ...]) -> None:
    path, told = (numbers(*size) if name in parts else None for name, size in (("path", (3, 9)), ("told", (3, 13))))
    for T in (1, 4):
        found = []
        for note in (state_update.commit_round, update_kernels.commit_round):
            root, lengths, active = torch.tensor([90, 91, 92]), torch.tensor([3, 5, 8]), torch.tensor([1, 0, 1])
            num = torch.tensor([T, 1, 1]) * active
            wide = numbers(3, 1 + 2 * T, most=50)  # as `accept_path` gives them
            paths = path if path is None else path[:, :T] % T
            counted = note(root, lengths, active, num, wide[:, 1 : 1 + T], paths, told, logits_with_nan(T))
            found.append((root, lengths, counted))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert found[0][0][1] == 91 and found[0][1].tolist() == [3 + T, 5, 9]


def logits_with_nan(T: int) -> Tensor:
    """Rows of a wider step, one of them with NaN."""
    logits = torch.randn(3, T + 2, 5000, generator=torch.Generator().manual_seed(1))
    logits[0, T // 2, 4500] = torch.nan
    return logits[:, :T]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("V", [7, 384, 5000])
def test_logits_that_are_not_numbers_are_found(dtype: torch.dtype, V: int) -> None:
    """In any place of the vocabulary; -inf is allowed among numbers."""
    T = 3
    for at in (0, V // 2, V - 1):
        for bad in (torch.nan, torch.inf, -torch.inf, None):
            logits = torch.randn(4, T, V, generator=torch.Generator().manual_seed(1)).to(dtype)
            logits[0, 1, at] = 0.0 if bad is None else bad
            logits[1, 2] = -torch.inf  # all of a row
            logits[3, 0, at] = torch.nan  # of an idle one
            num, path = torch.tensor([3, 3, 2, 0]), torch.tensor([[0, 2, 1], [0, 1, 2], [0, 1, 1], [0, 1, 2]])
            spoilt = bad is not None and bad != -torch.inf
            for paths, first in ((None, 1 if spoilt else 3), (path, 2 if spoilt else 3)):
                want = [first, 2, 2, 0]
                for count in (state_update.count_finite, state_update.count_finite_reference):
                    assert count(logits, paths, num).tolist() == want
                state = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), num.clamp(max=1)
                packed = update_kernels.commit_round(*state, num, numbers(4, T), paths, None, logits)
                assert packed[:, 1].tolist() == want


@pytest.mark.parametrize("T", [1, 4])
def test_a_rounds_tokens_in_each_text(T: int) -> None:
    """Idle rows keep theirs, and what would lie behind the last slot is left out."""
    found = []
    for note in (state_update.append_tokens, state_update.append_tokens_reference, update_kernels.append_tokens):
        text, root, at = torch.arange(40).view(4, 10) - 100, torch.tensor([70, 71, 72, 73]), torch.tensor([3, 5, 8, 0])
        num, wide = torch.tensor([T, 0, T, 1]), numbers(4, 1 + 2 * T, most=50)
        note(text[:, :9], root, at, num, wide[:, 1 : 1 + T])
        found.append(text)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert found[0][0].tolist() == [-100, -99, -98, 70, *wide[0, 1 : 1 + T].tolist(), *range(-96 + T, -90)]
    assert found[0][1].tolist() == list(range(-90, -80)) and found[0][2, 8:].tolist() == [72, -71]


def test_accepted_paths() -> None:
    tokens, target = numbers(40, 6, most=2) - numbers(40, 6, most=2, seed=1), numbers(40, 7, most=2)
    out, want = accept_path(tokens, None, None, target), accept_match(tokens, target)
    assert torch.equal(out[:, 0], want.num_new) and len(set(want.num_new.tolist())) > 3
    kept = torch.arange(7) < want.num_new[:, None]
    for found, wanted in ((out[:, 1:8], target), (out[:, 8:], want.path)):
        assert torch.equal(found.where(kept, 0), wanted.where(kept, 0))


def state(B: int, top: int, deepest: int, most: int) -> tuple[Tensor, Nodes, Frontier, ExpandedDraft]:
    C = top + (deepest - 1) * top**2

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(B, *shape, dtype=torch.int64)

    nodes = Nodes(zeros(C) - 1, torch.full((B, C), -torch.inf), zeros(C, deepest), zeros(C) + 77)
    frontier = Frontier(zeros(top), torch.zeros(B, top), zeros(top, deepest), zeros(top, deepest), zeros(top))
    draft = ExpandedDraft(zeros(most) - 9, zeros(1 + most), zeros(1 + most, 1 + most), zeros(1 + most))
    return zeros(), nodes, frontier, draft


@pytest.mark.parametrize("top, levels, deepest, wanted, most", [(3, 4, 5, 11, 15), (1, 2, 2, 1, 3), (4, 2, 3, 36, 40)])
def test_trees_grow_alike(top: int, levels: int, deepest: int, wanted: int, most: int) -> None:
    ours, theirs = state(2, top, deepest, most), state(2, top, deepest, most)
    for level in range(levels):
        num = 1 if level == 0 else top
        logp = -torch.rand(2, num, top, generator=torch.Generator().manual_seed(level))
        if top > 1:
            logp[0, 0, 0] = -torch.inf  # a banned token
        new = numbers(2, num, top, most=99, seed=level)
        expand_kernels.expand_tree(ours[0], *ours[1], *ours[2], new, logp)
        tree_expand.expand_tree(*theirs[:3], new, logp)
        for a, b in zip((ours[0], *ours[1], *ours[2]), (theirs[0], *theirs[1], *theirs[2]), strict=True):
            assert torch.equal(a, b)
    num_1 = torch.tensor([wanted])
    expand_kernels.select_nodes(num_1, top, *ours[1], *ours[3])
    tree_expand.select_nodes(num_1, top, theirs[1], theirs[3])
    read = torch.arange(1 + most) <= theirs[3].depth_BT[..., None]
    for a, b in zip(ours[3], theirs[3], strict=True):
        assert torch.equal(a, b) if a.ndim < 3 else torch.equal(a.where(read, 0), b.where(read, 0))
    assert (ours[3].tokens_BN >= 0).sum(1).tolist() == [min(wanted, ours[1].tokens_BC.shape[1])] * 2 or levels < deepest
