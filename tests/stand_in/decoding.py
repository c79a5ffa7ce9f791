"""Engines that decode under the stand-in driver, and what they ask of the device."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sharesd.config import EngineConfig, Mode, OffloadConfig
from sharesd.sampling_params import SamplingParams
from tests.stand_in.plausible import counts, driver, in_rounds, install

if TYPE_CHECKING:
    from multigpu.data_parallel import Numbered, TaskQueue
    from sharesd.runtime import Runtime

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
    resident: int | None = None,
    **results: Any,
) -> Counted:
    """Decode one text, or with `joins` a few that come one after the other, in one of the modes that are loaded.

    `resident`: so many blocks stay on the device, and the weights of the others travel. `results`: see
    `plausible.install`. Returns what `count` says, and bytes that were taken since the runtime began.
    """
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    install(**results)
    runtime = load(config, modes, results.get("rows_agree", True), resident)
    found = count(runtime, mode, params, joins=joins, each_kind=each_kind)
    taken = [driver().fake_peak(device) for device in range(torch.cuda.device_count())]
    plan, memory = runtime.plan, {"taken": max(taken), "pinned": driver().fake_pinned()}
    if plan is not None:
        memory |= {"planned": plan.device_bytes, "to pin": sum(plan.blocks[block] for block in plan.from_host)}
    return found | memory | {"registered": driver().fake_registered()}


def decode_on_replicas(*arguments: Any, **options: Any) -> Counted:
    """`decode` in two processes at once, each with a GPU of its own; of both the worse numbers."""
    from multigpu.data_parallel import environments, run_tasks, start

    with tempfile.TemporaryDirectory() as folder:
        replicas = start("tests.stand_in.decoding:replica", (folder, arguments, options), environments(2, "cuda"))
        both = [found for _, found in run_tasks(enumerate("ab"), replicas, max_assigned=1)]
    least = {name: min(found[name] for found in both) for name in ("captures", "replayed", "drafted")}
    return {name: max(found[name] for found in both) for name in both[0]} | least


def replica(work: tuple[str, tuple, dict[str, Any]], tasks: TaskQueue) -> Iterator[Numbered]:
    """What `decode` finds in a process, once both have something to do."""
    folder, arguments, options = work
    while (task := tasks.take(wait=True)) is not None:
        (Path(folder) / os.environ["CUDA_VISIBLE_DEVICES"]).touch()
        while len(list(Path(folder).iterdir())) < 2:
            time.sleep(0.05)
        assert torch.cuda.device_count() == 1
        yield task[0], decode(*arguments, **options)


_loaded: list[tuple[Any, Runtime]] = []


def load(
    config: EngineConfig, modes: tuple[Mode, ...], rows_agree: bool = True, resident: int | None = None
) -> Runtime:
    """The runtime of the last call, if it was for the same; else that one goes first."""
    from sharesd.runtime import Runtime

    wanted = config, modes, rows_agree, resident
    if not _loaded or _loaded[0][0] != wanted:
        if _loaded:
            _loaded.pop()[1].close()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        driver().fake_forget_peaks()
        if resident is not None:
            config = replace(config, offload=_leaving(resident, config, modes))
        _loaded.append((wanted, Runtime(config, modes)))
    return _loaded[0][1]


def _leaving(resident: int, config: EngineConfig, modes: tuple[Mode, ...]) -> OffloadConfig:
    """The limit that leaves so many blocks on the device."""
    from sharesd.weights.offload_planner import plan_for

    whole = plan_for(replace(config, offload=OffloadConfig(device_memory=torch.cuda.mem_get_info()[0])), modes)
    assert whole is not None and not whole.plan.offloads
    plan = whole.plan
    return OffloadConfig(device_memory=plan.device_bytes - (plan.num_blocks - resident - 2) * plan.slot)


def count(
    runtime: Runtime, mode: Mode, params: SamplingParams, *, joins: bool = False, each_kind: bool = False
) -> Counted:
    """Decode twice, and count what happened the second time; of each round what it asked the driver for."""
    from compile.cuda_graphs import Graphs

    before_warm, started = Graphs.num_captures, time.perf_counter()
    engine = runtime.engine(mode, warm=params, each_kind=each_kind)
    warm_s = time.perf_counter() - started
    warmed, most = counts(), runtime.config.max_batch + 2
    if joins:
        joined(engine, params, most)
    else:
        engine.generate([PROMPT] * runtime.config.max_batch, params)
    first = counts() - warmed
    before, seen, seen_in_rounds = Graphs.num_captures, counts(), in_rounds.copy()
    if joins:
        engine._outputs.begin_call(engine._new_stats())
        requests = joined(engine, params, most)
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
        "drafted": engine.stats.drafted_tokens,
        "launched": of["launches"] + of["blas"],
        "graphs": of["graph_launches"],
        "replayed": of["replayed"],
        "syncs": of["stream_syncs"] + of["device_syncs"] + of["event_syncs"],
        "to host": of["to_host"],
        "to device": of["to_device"],
        "collectives": of["collectives"],
        "first mallocs": first["mallocs"],
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
