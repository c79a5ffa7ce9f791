"""One user of a server of eight has the rounds of a server of one: the same graphs, of kernels with the same grids."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

from sharesd.config import EngineConfig, Kernels, Mode
from sharesd.sampling_params import SamplingParams
from tests.helpers.in_mode import in_mode
from tests.helpers.shared_runtimes import Shared
from tests.stand_in.decoding import PROMPT, joined, load
from tests.stand_in.plausible import install
from tests.stand_in.worker import run

MODES: tuple[Mode, ...] = ("share", "eagle", "hybrid")
"""Rounds of `naive` are the plain ones of `share`."""
ROWS = (1, 8)
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
_launched: list[tuple[str, tuple[int, ...]]] = []  # names and grids of our kernels
_replayed: list[tuple[tuple[str, tuple[int, ...]], ...]] = []


@cache
def note_grids() -> None:
    """From now on, note what graphs are made of, and which are replayed."""
    from triton.runtime.jit import JITFunction

    from compile.cuda_graphs import Graphs

    run, record = JITFunction.run, Graphs._record

    def noted(self: Any, *args: Any, grid: Any, **options: Any) -> Any:
        if not callable(grid):  # as others' may be
            _launched.append((self.fn.__name__, tuple(grid)))
        return run(self, *args, grid=grid, **options)

    def recorded(self: Any, function: Any) -> Any:
        _launched.clear()
        replay, result = record(self, function)
        launches = tuple(_launched)
        return lambda: (_replayed.append(launches), replay()), result

    JITFunction.run, Graphs._record = noted, recorded


def decoded(config: EngineConfig, each_kind: bool) -> dict[str, Any]:
    """Graphs that one user's rounds replay; then users come and go: rows that rounds have, and what is captured."""
    from compile.cuda_graphs import Graphs

    install(), note_grids()
    runtime = load(config, (config.mode,))
    graphs, before = runtime.model.graphs, Graphs.num_captures
    assert graphs is not None
    bytes_before = graphs.nbytes
    engine = in_mode(runtime, config.mode, warm=PARAMS, each_kind=each_kind)
    found = {"captures": Graphs.num_captures - before, "megabytes": (graphs.nbytes - bytes_before) / 1e6}
    before = Graphs.num_captures
    _replayed.clear()
    engine.generate([PROMPT], PARAMS)
    found["of one"] = {*_replayed}
    _replayed.clear()
    joined(engine, PARAMS, min(config.max_batch + 2, 7))
    rows = {grid[0] for launches in _replayed for name, grid in launches if name == "commit_round_kernel"}
    return found | {"rows": sorted(rows), "after": Graphs.num_captures - before, "sizes": engine.batch_sizes}


Key = tuple[Mode, int, Kernels, bool]


@pytest.fixture(scope="module")
def found(shared: Shared) -> dict[Key, dict[str, Any]]:
    """Replays of each mode with one row and with eight, of kernels that are not ours, and of rounds of each kind."""
    target = shared.checkpoint(hidden=128, layers=2)
    heads = (str(shared.head(target, "eagle3", dtype=torch.bfloat16)),)
    options = {"target": str(target), "heads": heads, "device": "cuda", "max_context": 512, "num_draft": 4}
    keys: list[Key] = [(mode, rows, "triton", False) for mode in MODES for rows in ROWS]  # streams are for one row
    keys += [("naive", 8, "torch", False), ("share", 8, "auto", True)]
    calls = [
        partial(decoded, EngineConfig(mode=mode, max_batch=rows, kernels=kernels, **options), each_kind)
        for mode, rows, kernels, each_kind in keys
    ]
    outcomes = dict(zip(keys, run(calls), strict=True))
    for key, outcome in outcomes.items():
        assert not outcome.trouble, (key, outcome.trouble)
    return {key: outcome.value for key, outcome in outcomes.items()}


@pytest.mark.parametrize("mode", MODES)
def test_one_of_eight_replays_what_one_of_one_does(mode: Mode, found: dict[Key, dict[str, Any]]) -> None:
    alone, eight = (found[mode, rows, "triton", False] for rows in ROWS)
    assert alone["of one"] == eight["of one"] and all(alone["of one"])
    assert (alone["rows"], eight["rows"]) == ([1], [1, 2, 4, 8]), "as users come and go"
    assert eight["captures"] == 4 * alone["captures"] and alone["after"] == eight["after"] == 0
    assert eight["megabytes"] < 64


def test_a_server_captures_rounds_of_each_kind_and_drafts_once(found: dict[Key, dict[str, Any]]) -> None:
    """Rounds: greedy, sampled, adjusted, each with log-probabilities or not; drafts depend on the first three alone."""
    of_each_kind = found["share", 8, "auto", True]
    plain_and_full, first_and_next, sizes = 2, 2, 4
    assert of_each_kind["captures"] == (6 * plain_and_full + 3 * first_and_next) * sizes
    assert of_each_kind["after"] == 0 and of_each_kind["megabytes"] < 64


def test_rounds_of_kernels_that_are_not_ours_have_all_rows(found: dict[Key, dict[str, Any]]) -> None:
    """Though the check of rows says that they could have fewer."""
    theirs = found["naive", 8, "torch", False]
    assert theirs["sizes"] == [8] and theirs["captures"] and theirs["after"] == 0
