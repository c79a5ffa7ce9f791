"""One user of a server of eight has the rounds of a server of one: the same graphs, of kernels with the same grids."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from sharesd.config import EngineConfig, Kernels, Mode
from tests.helpers.shared_runtimes import Shared
from tests.stand_in.buckets import decoded
from tests.stand_in.worker import run

MODES: tuple[Mode, ...] = ("naive", "share", "eagle", "hybrid")
ROWS = (1, 8)

Key = tuple[Mode, int, Kernels]
Found = dict[Key, Any]


@pytest.fixture(scope="module")
def found(shared: Shared) -> Found:
    """Replays of each mode with one row and with eight."""
    target = shared.checkpoint(hidden=128, layers=2)
    head = shared.head(target, "eagle3", dtype=torch.bfloat16)
    keys: list[Key] = [(mode, rows, "auto") for mode in MODES for rows in ROWS]
    keys.append(("naive", 8, "torch"))
    options = {"target": str(target), "heads": (str(head),), "device": "cuda", "max_context": 512, "num_draft": 4}
    calls = [
        partial(decoded, EngineConfig(mode=mode, max_batch=rows, kernels=kernels, **options), mode)
        for mode, rows, kernels in keys
    ]
    outcomes = dict(zip(keys, run(calls), strict=True))
    for key, outcome in outcomes.items():
        assert not outcome.trouble, (key, outcome.trouble)
    return {key: outcome.value for key, outcome in outcomes.items()}


@pytest.mark.parametrize("mode", MODES)
def test_one_of_eight_replays_what_one_of_one_does(mode: Mode, found: Found) -> None:
    alone, eight = (found[mode, rows, "auto"] for rows in ROWS)
    assert alone["of one"] == eight["of one"] and all(alone["of one"])
    assert (alone["rows"], eight["rows"]) == ([1], [1, 2, 4, 8]), "as users come and go"
    assert eight["captures"] == 4 * alone["captures"] and alone["after"] == eight["after"] == 0
    assert eight["megabytes"] < 64


def test_a_server_captures_rounds_of_each_kind_and_drafts_once(shared: Shared) -> None:
    """Rounds: greedy, sampled, adjusted, each with log-probabilities or not; drafts depend on the first three alone."""
    target = shared.checkpoint(hidden=128, layers=2)
    options = {"target": str(target), "device": "cuda", "max_context": 512, "num_draft": 4, "max_batch": 8}
    [outcome] = run([partial(decoded, EngineConfig(mode="share", **options), "share", each_kind=True)])
    assert not outcome.trouble, outcome.trouble
    plain_and_full, first_and_next, sizes = 2, 2, 4
    assert outcome.value["captures"] == (6 * plain_and_full + 3 * first_and_next) * sizes
    assert outcome.value["after"] == 0 and outcome.value["megabytes"] < 64


def test_rounds_of_kernels_that_are_not_ours_have_all_rows(found: Found) -> None:
    """Though the check of rows says that they could have fewer."""
    theirs = found["naive", 8, "torch"]
    assert theirs["sizes"] == [8] and theirs["captures"] and theirs["after"] == 0
