"""Engines that decode under the stand-in driver, and what they ask of the device."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from typing import Any

import torch

from sharesd.config import EngineConfig, Mode, OffloadConfig
from sharesd.sampling_params import SamplingParams
from tests.helpers.in_mode import in_mode
from tests.stand_in.plausible import counts, driver, in_rounds, install

PROMPT = [5, 6, 7, 8] * 3


def decode(
    config: EngineConfig,
    modes: tuple[Mode, ...],
    mode: Mode,
    params: SamplingParams,
    *,
    joins: bool = False,
    resident: int | None = None,
    **results: Any,
) -> dict[str, float]:
    """Decode one text, or with `joins` a few that come one after the other, in one of the modes that are loaded; twice.

    `resident`: so many blocks stay on the device, and the weights of the others travel. `results`: see
    `plausible.install`. Returns what happened the second time, of each round what it asked the driver for, and bytes
    that were taken since the runtime began.
    """
    from compile.cuda_graphs import Graphs
    from sharesd.startup.warmup import verify_all_sizes

    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    install(**results)
    runtime = load(config, modes, results.get("rows_agree", True), resident)
    before_warm = Graphs.num_captures
    engine = in_mode(runtime, mode, warm=params)
    warmed, most = counts(), runtime.config.max_batch + 2
    if joins:
        joined(engine, params, most)
    else:
        engine.generate([PROMPT] * runtime.config.max_batch, params)
    before, seen, seen_in_rounds = Graphs.num_captures, counts(), in_rounds.copy()
    if joins:
        requests = joined(engine, params, most)
        assert all(request.finish_reason or request.cancelled for request in requests)
    else:
        (done,) = engine.generate([PROMPT], params)
        assert len(done.token_ids) == params.max_new_tokens, done
    if engine.graphs is None and not engine.offloaded and params.acceptance == "match":
        verify_all_sizes(engine, mode, params)  # which of them the rounds had depends on time
    now, sums = counts(), {name: number - seen_in_rounds[name] for name, number in in_rounds.items()}
    # Not those of `engine.stats`, which begin anew when a request joins an idle engine.
    rounds = sums["rounds"]
    of = {name: number / rounds for name, number in sums.items()}
    found = {
        "captures": before - before_warm,
        "after": Graphs.num_captures - before,
        "rounds": rounds,
        "drafted": sums["drafted"],
        "launched": of["launches"] + of["blas"],
        "graphs": of["graph_launches"],
        "syncs": of["stream_syncs"] + of["device_syncs"] + of["event_syncs"],
        **{name.replace("_", " "): of[name] for name in ("replayed", "to_host", "to_device", "collectives")},
        "first mallocs": seen["mallocs"] - warmed["mallocs"],
        **{name: now[name] - seen[name] for name in ("mallocs", "host_mallocs", "modules", "violations")},
        "taken": max(driver().fake_peak(device) for device in range(torch.cuda.device_count())),
        "registered": driver().fake_registered(),
    }
    if (plan := runtime.plan) is not None:
        found |= {"planned": plan.device_bytes, "to pin": sum(plan.blocks[block] for block in plan.from_host)}
    return found


_loaded: list[tuple[Any, Any]] = []


def load(config: EngineConfig, modes: tuple[Mode, ...], rows_agree: bool = True, resident: int | None = None) -> Any:
    """The runtime of the last call, if it was for the same; else that one goes first."""
    from sharesd.runtime import Runtime
    from tests.helpers.offloaded import limit_leaving

    wanted = config, modes, rows_agree, resident
    if not _loaded or _loaded[0][0] != wanted:
        if _loaded:
            _loaded.pop()[1].close()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        driver().fake_forget_peaks()
        if resident is not None:
            whole = replace(config, offload=OffloadConfig(device_memory=torch.cuda.mem_get_info()[0]))
            config = replace(config, offload=OffloadConfig(device_memory=limit_leaving(resident, whole, *modes)))
        _loaded.append((wanted, Runtime(config, modes)))
    return _loaded[0][1]


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
