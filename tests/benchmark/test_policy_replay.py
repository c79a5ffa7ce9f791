"""Replays of recorded drafts: `benchmark.studies.policy_replay`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmark.studies import policy_replay
from benchmark.studies.draft_records import DraftRecords

LENGTH, CHAIN, NODES = 20, 8, 12


def made_records(seed: int) -> DraftRecords:
    """An answer whose drafts hold the right token with a chance of 0.7, and say so; 3 branches in a tree's level."""
    dice = np.random.default_rng(seed)
    answer = dice.integers(10, 40, LENGTH)
    padded = np.concatenate([answer, dice.integers(10, 40, CHAIN)])
    right = np.stack([padded[at : at + CHAIN] for at in range(1, LENGTH)])
    chains = np.where(dice.random(right.shape) < 0.7, right, 5)
    parents = np.array([-1] * 3 + [0] * 3 + [3] * 3 + [6] * 3)
    trees = np.tile(np.arange(40, 40 + NODES), (LENGTH - 1, 1))
    trees[:, ::3] = chains[:, : NODES // 3]
    return DraftRecords(
        kind="made",
        prompt=dice.integers(10, 40, 12).tolist(),
        answer=answer.tolist(),
        chain_tokens_PN=chains,
        chain_probs_PN=np.full(chains.shape, 0.7),
        tree_tokens_PC=trees,
        tree_probs_PC=np.tile([0.7, 0.1, 0.1], (LENGTH - 1, NODES // 3)),
        tree_parents_PC=np.tile(parents, (LENGTH - 1, 1)),
    )


def test_each_cell_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, temperature, context, _ in policy_replay.RECORDED:
        folder = tmp_path / f"{mode}-T{temperature}-{context}"
        folder.mkdir()
        for seed in range(8):
            made_records(seed).save(folder / f"{seed}.npz")
    monkeypatch.setattr(policy_replay, "SEEDS", 1)
    lines: list[str] = []
    policy_replay.table(tmp_path, ["the whole policy", "without trials"], lines.append)
    assert lines[0] == ",".join(("policy", *policy_replay.GROUPS, "mean"))
    speedups = [[float(field) for field in line.split(",")[1:]] for line in lines[1:]]
    assert all(0.5 < value < 4 for row in speedups for value in row) and speedups[0] != speedups[1]
