"""Times the host's side of rounds under the stand-in driver, whose device takes no time.

    tests/stand_in/run.sh tests/stand_in/host_time.py
    OLDER/tests/stand_in/run.sh tests/stand_in/host_time.py      # the same of an older checkout

Of each mode, with plain rounds and with drafts, in microseconds a round, the minimum and the median over the rounds:

    host    all that the host does in a round
    idle    of that, what a device waits for that has done all it was asked for: from the moment at which its result is
            seen until the next round's first launch; 0 where that had been launched before
    replay  of `host`, launching graphs, which is the stand-in's own time
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from tests.helpers.in_mode import in_mode
from tests.stand_in.plausible import counts, install

PROMPT = [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30]
MODES = ("naive", "share", "eagle", "classic", "hybrid")


class Times:
    """Times of one engine's rounds, while it is decoding."""

    def __init__(self) -> None:
        self.host: list[float] = []
        self.idle: list[float] = []
        self.replay: list[float] = []
        self._seen_at: float | None = None  # when the result was read of a round with nothing behind it
        self._apart = self._replay_s = 0.0  # of this round: the stand-in's own time; launching graphs
        self._reads = False

    def begin(self) -> None:
        """Forget the case before."""
        self.__init__()  # type: ignore[misc]

    def install(self) -> None:
        """Time all rounds from now on. Before `plausible.install`, whose own work is left out by `leave_out`."""
        from compile.cuda_graphs import Replayed
        from sharesd.engine.engine import Engine

        round_, collect, call, read = Engine._round, Engine._collect, Replayed.__call__, torch.Tensor.tolist

        def timed_round(engine: Any) -> Any:
            self._apart = self._replay_s = 0.0
            began = time.perf_counter()
            chunks = round_(engine)
            self.host.append(time.perf_counter() - began - self._apart)
            self.replay.append(self._replay_s)
            return chunks

        def timed_collect(engine: Any, in_flight: Any) -> Any:
            self._reads = engine._in_flight is None
            if engine._in_flight is not None:
                self.idle.append(0.0)
            return collect(engine, in_flight)

        def timed_call(replayed: Any) -> Any:
            began = time.perf_counter()
            if self._seen_at is not None:
                self.idle.append(began - self._seen_at)
                self._seen_at = None
            found = call(replayed)
            self._replay_s += time.perf_counter() - began
            return found

        def timed_read(tensor: torch.Tensor) -> Any:
            found = read(tensor)
            if self._reads:
                self._reads, self._seen_at = False, time.perf_counter()
            return found

        Engine._round, Engine._collect = timed_round, timed_collect  # type: ignore[method-assign]
        Replayed.__call__, torch.Tensor.tolist = timed_call, timed_read  # type: ignore[method-assign]

    def leave_out(self, name: str) -> None:
        """Leave out: what `plausible` has put around this method of the engine is no time of rounds."""
        from sharesd.engine.engine import Engine

        around = getattr(Engine, name)
        inner = next(cell.cell_contents for cell in around.__closure__ if getattr(cell.cell_contents, "inner", False))

        def outer(*args: Any) -> Any:
            began, inner_s = time.perf_counter(), inner.seconds
            found = around(*args)
            self._apart += time.perf_counter() - began - (inner.seconds - inner_s)
            return found

        setattr(Engine, name, outer)


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Counts its seconds, for `Times.leave_out`."""

    def inner(*args: Any) -> Any:
        began = time.perf_counter()
        found = function(*args)
        inner.seconds += time.perf_counter() - began  # type: ignore[attr-defined]
        return found

    inner.inner, inner.seconds = True, 0.0  # type: ignore[attr-defined]
    return inner


def shapes_of(policy: Any) -> dict[str, Any]:
    """Cases: shapes of the policy, plain rounds, drafts of four tokens and of a tree, as far as the mode has them."""
    from sharesd.speculation.draft_tree import NO_DRAFT

    chains = [shape for shape in policy.shapes if not shape.is_tree and shape.nodes == 4]
    trees = [shape for shape in policy.shapes if shape.is_tree]
    found = {"whatever the policy takes": None, "plain": NO_DRAFT}
    if chains:
        found["chain of 4"] = chains[-1]
    if trees:
        found["largest tree"] = trees[-1]
    return found


def run_case(engine: Any, params: Any, batch: int, times: Times, profile: bool) -> dict[str, float]:
    """Rounds of one pinned shape."""
    engine.generate([PROMPT] * batch, params)  # whatever is seen for the first time
    profiler = cProfile.Profile()
    times.begin()
    before = counts()
    if profile:
        profiler.enable()
    engine.generate([PROMPT] * batch, params)
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(32)
    now, rounds = counts(), engine.stats.steps
    us = {name: [1e6 * s for s in getattr(times, name)] for name in ("host", "idle", "replay")}
    found = {f"{name} {what.__name__}": what(us[name] or [0.0]) for name in us for what in (min, median)}
    found["waits"] = sum(now[each] - before[each] for each in ("stream_syncs", "device_syncs", "event_syncs")) / rounds
    found["reads"] = (now["to_host"] - before["to_host"]) / rounds
    found["graphs"] = (now["graph_launches"] - before["graph_launches"]) / rounds
    found["launches"] = (now["launches"] - before["launches"]) / rounds
    found["mallocs"] = now["mallocs"] - before["mallocs"] + now["host_mallocs"] - before["host_mallocs"]
    found["rounds"] = rounds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--profile", action="store_true", help="where the host's time goes, by function")
    args = parser.parse_args()

    times = Times()
    times.install()
    from sharesd.engine.engine import Engine

    Engine._collect = watched(Engine._collect)  # type: ignore[method-assign]
    install()
    times.leave_out("_collect")

    from sharesd import EngineConfig, SamplingParams
    from sharesd.runtime import Runtime
    from sharesd.speculation.draft_tree import NO_DRAFT

    modes = args.modes.split(",")
    runtime = Runtime(EngineConfig(device="cuda", max_batch=args.batch), modes)
    for mode in modes:
        params = SamplingParams(
            max_new_tokens=args.rounds, ignore_eos=True, temperature=args.temperature, logprobs=args.logprobs
        )
        engine = in_mode(runtime, mode, warm=params)
        policy = engine.variant(params).policy
        for name, shape in shapes_of(policy).items():
            if shape is None and mode == "naive":
                continue
            policy.pinned = shape
            num = args.rounds * (1 if shape == NO_DRAFT else 3)  # some rounds bring several tokens
            found = run_case(engine, replace(params, max_new_tokens=num), args.batch, times, args.profile)
            print(f"{mode}, {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
    print("violations:", counts()["violations"])


if __name__ == "__main__":
    main()
