"""Replays of one user's rounds, of a server of one row and of more, under the stand-in driver.

As a program, of the embedded model: tests/stand_in/run.sh -m tests.stand_in.buckets [MODE]...
"""

from __future__ import annotations

import sys
import time
from functools import cache
from typing import Any

from sharesd.config import EngineConfig, Mode
from sharesd.sampling_params import SamplingParams
from tests.stand_in.decoding import PROMPT, joined, load
from tests.stand_in.plausible import install

Launches = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and grids of our kernels."""
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
_launched: list[tuple[str, tuple[int, ...]]] = []
_replayed: list[Launches] = []


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

        def replayed() -> None:
            _replayed.append(launches)
            replay()

        return replayed, result

    JITFunction.run, Graphs._record = noted, recorded


def decoded(config: EngineConfig, mode: Mode, each_kind: bool = False) -> dict[str, Any]:
    """Graphs that one user's rounds replay; then users come and go: rows that rounds have, and what is captured."""
    from compile.cuda_graphs import Graphs

    install(), note_grids()
    runtime = load(config, (mode,))
    graphs, before, started = runtime._steps.graphs, Graphs.num_captures, time.perf_counter()
    assert graphs is not None
    bytes_before = graphs.nbytes
    engine = runtime.engine(mode, warm=PARAMS, each_kind=each_kind)
    found = {"captures": Graphs.num_captures - before, "seconds": time.perf_counter() - started}
    found["megabytes"] = (graphs.nbytes - bytes_before) / 1e6
    before = Graphs.num_captures
    _replayed.clear()
    engine.generate([PROMPT], PARAMS)
    found["of one"] = {*_replayed}
    _replayed.clear()
    joined(engine, PARAMS, min(config.max_batch + 2, 7))
    rows = {grid[0] for launches in _replayed for name, grid in launches if name == "commit_round_kernel"}
    return found | {"rows": sorted(rows), "after": Graphs.num_captures - before, "sizes": engine.batch_sizes}


def main() -> None:
    for mode in sys.argv[1:] or ("naive", "share", "hybrid", "eagle", "classic"):
        for batch in (1, 8):
            config = EngineConfig(device="cuda", mode=mode, max_batch=batch, num_draft=4)  # type: ignore[arg-type]
            for each_kind in (False, True):
                found = decoded(config, mode, each_kind)  # type: ignore[arg-type]
                kernels = sorted(map(len, found.pop("of one")))
                print(f"{mode}, {batch} rows, each_kind={each_kind}: kernels of graphs {kernels}, {found}", flush=True)


if __name__ == "__main__":
    main()
