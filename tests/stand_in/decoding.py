"""Engines that decode under the stand-in driver, and what they ask of the device."""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sharesd.config import EngineConfig, Mode, SamplingParams
from tests.stand_in.plausible import counts, driver, in_rounds, install

if TYPE_CHECKING:
    from sharesd.load import Runtime

Counted = dict[str, float]
PROMPT = [5, 6, 7, 8] * 3


def decode(
    config: EngineConfig,
    modes: tuple[Mode, ...],
    mode: Mode,
    params: SamplingParams,
    *,
    joins: bool = False,
    each_kind: bool = False,
    **results: Any,
) -> Counted:
    """Decode one text, or with `joins` a few that come one after the other, in one of the modes that are loaded.

    Returns what `count` says, and of the whole process so far the bytes taken. `results`: see `plausible.install`.
    """
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    install(**results)
    runtime = load(config, modes, results.get("rows_agree", True))
    found = count(runtime, mode, params, joins=joins, each_kind=each_kind)
    for device in range(torch.cuda.device_count()):
        found[f"peak {device}"] = driver().fake_peak(device)
    return found | {"pinned": driver().fake_pinned(), "planned": runtime.plan.device_bytes if runtime.plan else 0}


_loaded: list[tuple[Any, Runtime]] = []


def load(config: EngineConfig, modes: tuple[Mode, ...], rows_agree: bool = True) -> Runtime:
    """The runtime of the last call, if it was for the same; else that one goes first."""
    from sharesd.load import Runtime

    wanted = config, modes, rows_agree
    if not _loaded or _loaded[0][0] != wanted:
        if _loaded:
            _loaded.pop()[1].close()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        driver().fake_forget_peaks()
        _loaded.append((wanted, Runtime(config, modes)))
    return _loaded[0][1]


def count(
    runtime: Runtime, mode: Mode, params: SamplingParams, *, joins: bool = False, each_kind: bool = False
) -> Counted:
    """Decode, and count what happened after warming up; of each round what it asked the driver for."""
    from compile.graphs import Graphs

    before_warm, started = Graphs.num_captures, time.perf_counter()
    engine = runtime.engine(mode, warm=params, each_kind=each_kind)
    warm_s = time.perf_counter() - started
    engine.generate([PROMPT] * runtime.config.max_batch, params)  # may see something for the first time
    before, seen, seen_in_rounds = Graphs.num_captures, counts(), in_rounds.copy()
    if joins:
        engine.stats = engine._new_stats()
        requests = joined(engine, params, runtime.config.max_batch + 2)
        assert all(request.finish_reason or request.cancelled for request in requests)
    else:
        (done,) = engine.generate([PROMPT], params)
        assert len(done.token_ids) == params.max_new_tokens, done
    rounds = max(1, engine.stats.steps)
    now = counts()
    of = {name: (number - seen_in_rounds[name]) / rounds for name, number in in_rounds.items()}
    return {
        "captures": before - before_warm,
        "after": Graphs.num_captures - before,
        "rounds": engine.stats.steps,
        "launched": of["launches"] + of["blas"],
        "graphs": of["graph_launches"],
        "replayed": of["replayed"],
        "syncs": of["stream_syncs"] + of["device_syncs"] + of["event_syncs"],
        "to host": of["to_host"],
        "to device": of["to_device"],
        **{name: now[name] - seen[name] for name in ("mallocs", "host_mallocs", "modules", "violations")},
        "warm s": warm_s,
    }


def joined(engine: Any, params: SamplingParams, num: int) -> list[Any]:
    """Requests that come one after the other, each while the others are decoded; one is cancelled."""
    requests: list[Any] = []
    waiting = [PROMPT * (1 + 6 * i) for i in range(num)]
    while waiting or engine.num_running or engine.num_waiting:
        if waiting:
            longer = replace(params, max_new_tokens=params.max_new_tokens // 2 + 8 * len(waiting))
            requests.append(engine.add(waiting.pop(), longer, len(requests)))
        engine.step()
        engine.step()
        if len(requests) == num - 1 and requests[0].finish_reason is None:
            engine.cancel(requests[0])
    return requests
