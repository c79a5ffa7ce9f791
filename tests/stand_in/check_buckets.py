"""Checks, under the stand-in driver, that one user on a server of eight has the rounds of a server of one.

Each mode is loaded for one row and for eight. The kernels of each graph are noted, with their grids, while it is
captured; graphs that one user's rounds replay must be the same in both. Each line must begin with ok.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

from tests.stand_in.plausible import counts, install, violations
from tests.stand_in.run_modes import MODES, PROMPT, joined

Graph = tuple[tuple[str, tuple[int, ...]], ...]
_captured: list[tuple[str, tuple[int, ...]]] | None = None
_replayed: list[Graph] = []


def note_grids() -> None:
    """From now on, note what graphs are made of, and which are replayed."""
    from triton.runtime.jit import JITFunction

    from compile.graphs import Graphs

    run, record = JITFunction.run, Graphs._record

    def noted(self: Any, *args: Any, grid: Any, **options: Any) -> Any:
        if _captured is not None:
            _captured.append((self.fn.__name__, tuple(grid(options) if callable(grid) else grid)))
        return run(self, *args, grid=grid, **options)

    def recorded(self: Any, function: Any) -> Any:
        global _captured
        _captured = []
        replay, result = record(self, function)
        graph, _captured = tuple(_captured), None

        def replayed() -> None:
            _replayed.append(graph)
            replay()

        return replayed, result

    JITFunction.run, Graphs._record = noted, recorded


def rounds_of_one(engine: Any, params: Any) -> tuple[list[Graph], int]:
    """Graphs that one user's rounds replay, in order, and the kernels that the driver replayed."""
    engine.generate([PROMPT], params)
    before = counts()["replayed"]
    _replayed.clear()
    engine.generate([PROMPT], params)
    return [*_replayed], counts()["replayed"] - before


def tell(right: bool, what: str) -> None:
    print("ok   " if right else "WRONG", what, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--each-kind", action="store_true", help="warm up all kinds of rounds, as a server does")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    from compile.graphs import Graphs
    from sharesd import EngineConfig, SamplingParams
    from sharesd.load import Runtime

    install()
    note_grids()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    for mode in args.modes.split(","):
        found: dict[int, list[Graph]] = {}
        for batch in (1, 8):
            runtime = Runtime(EngineConfig(device="cuda", max_batch=batch, num_draft=4), [mode])
            started, before = time.perf_counter(), Graphs.num_captures
            engine = runtime.engine(mode, warm=params, each_kind=args.each_kind)
            took, warmed = time.perf_counter() - started, Graphs.num_captures
            found[batch], kernels = rounds_of_one(engine, params)
            num, megabytes = warmed - before, runtime._graphs.nbytes / 1e6
            what = f"{num} graphs, {megabytes:.0f} MB, {took:.1f} s; {kernels} kernels replayed"
            print(f"      {mode}, {batch} rows: {what}", flush=True)
        tell({*found[8]} == {*found[1]}, f"{mode}: one user of eight has the {len({*found[1]})} graphs of one alone")
        requests = joined(engine, params, 10)
        tell(all(each.finish_reason or each.cancelled for each in requests), f"{mode}: ten users come and go")
        rows = {grid[0] for graph in _replayed for name, grid in graph if name == "note_round_of"}
        tell(len(rows) > 2 and rows <= {1, 2, 4, 8}, f"{mode}: rounds of {sorted(rows)} rows")
        tell(Graphs.num_captures == warmed, f"{mode}: nothing is captured after warm-up")
        del runtime, engine
    tell(not violations(), f"rules that were broken: {violations() or 'none'}")


if __name__ == "__main__":
    main()
