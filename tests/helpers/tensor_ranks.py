"""Ranks for the tests of tensor parallel: threads, or one of several processes (run with a task's name as argument)."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count, product
from threading import Thread
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from multigpu.failure_detector import RankLost
from multigpu.launch import join
from multigpu.process_group import Group, ThreadGroup
from sharesd.cli.console import main_guard
from sharesd.config import EngineConfig, Mode
from sharesd.models.loader import Tensors
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.startup import cost_profiler
from sharesd.startup.loaded_model import run_tp_worker
from tests.helpers.in_mode import in_mode

MODES: tuple[Mode, ...] = ("naive", "share", "suffix", "hybrid")
PROMPTS = ([5, 6, 7] * 5, [9], [30, 31, 8, 2])
GREEDY = SamplingParams(max_new_tokens=16)
SAMPLED = SamplingParams(max_new_tokens=16, temperature=1.0, seed=3)
SMALL: dict[str, Any] = {"device": "cpu", "mode": "naive", "max_context": 128, "threads": 1, "num_draft": 4}


class Delayed:
    """A group in which this rank comes late now and then."""

    _exchanges = ("all_gather", "broadcast", "broadcast_object", "barrier")

    def __init__(self, group: Group, most: float) -> None:
        self._group, self._most, self._dice = group, most, random.Random(group.rank)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        return partial(self._exchange, found) if name in self._exchanges else found

    def _exchange(self, exchange: Callable[..., Any], *given: Any) -> Any:
        if self._dice.random() < 0.1:
            time.sleep(self._dice.random() * self._most)
        return exchange(*given)


class Unwatched(Delayed):
    """A group whose own copies nobody notes."""

    _exchanges = ("all_gather", "broadcast")

    def _exchange(self, exchange: Callable[..., Any], *given: Any) -> Any:
        with _disable_current_modes():
            return exchange(*given)


class OwnTensors(TorchDispatchMode):
    """Notes operations of a rank, in whose thread it is entered, on tensors that another rank has made: on devices of
    their own they could not be. What passes through the group is copied.
    """

    def __init__(self, group: Group, makers: dict[int, tuple[int, UntypedStorage]], found: list[str]) -> None:
        """`makers`: storage -> rank, of all ranks. It keeps storages alive, since addresses are used again. Tensors
        would not: some get another storage.
        """
        super().__init__()
        self._rank, self._makers, self._found = group.rank, makers, found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for storage in _storages((args, kwargs)):
            maker, _ = self._makers.get(storage._cdata, (self._rank, None))
            if maker != self._rank:
                self._found.append(f"{func._schema.name} on rank {self._rank} of a tensor of rank {maker}")
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            self._makers.setdefault(storage._cdata, (self._rank, storage))
        return out


def _storages(values: Any) -> list[UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]


@contextmanager
def threads(
    config: EngineConfig,
    modes: Sequence[Mode] = ("naive",),
    *,
    tensors: Tensors | None = None,
    wrap: Callable[[Group], Group] = lambda group: group,
    around: Callable[[Group], AbstractContextManager[Any]] = lambda group: nullcontext(),
) -> Iterator[Runtime]:
    """Rank 0 of as many threads as the config says; the others must end with it, for no other reason. `around` is
    entered by each of them.
    """
    groups = [wrap(group) for group in ThreadGroup.new(config.tensor_parallel)]
    failures: list[BaseException] = []

    def rank(group: Group) -> None:
        try:
            with around(group), suppress(RankLost):
                run_tp_worker(group, tensors)
        except BaseException as failure:
            failures.append(failure)
            group.close()

    others = [Thread(target=rank, args=(group,), daemon=True) for group in groups[1:]]
    for other in others:
        other.start()
    try:
        with around(groups[0]), closing(Runtime(config, modes, group=groups[0], tensors=tensors)) as runtime:
            yield runtime
    finally:
        groups[0].close()
        for other in others:
            other.join(300)
        assert not failures, failures
        assert not any(other.is_alive() for other in others)


@torch.inference_mode()
def logits_of(runtime: Runtime) -> list[Tensor]:
    """Of a prompt of three rows, and of a step behind it."""
    cache, dice, found = runtime.cache, torch.Generator().manual_seed(0), []
    cache.lengths.zero_()
    for num in (17, 5):
        tokens_BT = torch.randint(runtime.target.vocab_size, (cache.batch, num), generator=dice)
        found.append(runtime.step.forward(tokens_BT, cache))
        cache.lengths += num
    cache.lengths.zero_()
    return found


def texts_of(runtime: Runtime, mode: Mode, params: SamplingParams) -> list[list[int]]:
    return [done.token_ids for done in in_mode(runtime, mode, warm=params).generate(PROMPTS, params)]


def texts_of_moved_rows(runtime: Runtime) -> list[list[int]]:
    """Requests join and leave, later prompts go on from what earlier ones left in other rows, and one is cancelled."""
    first, other = [5, 6, 7] * 9, [9, 8, 7, 6]
    engine = in_mode(runtime, runtime.modes[0], warm=GREEDY)
    done = engine.generate([first, other], GREEDY, reuse=True)
    later = [[*other, *done[1].token_ids, 3], [*first, *done[0].token_ids, 4], [*first, 12, 13]]
    requests = [engine.add(prompt, SAMPLED) for prompt in later]
    for step in range(200):
        if step == 3:
            engine.cancel(requests[2])
            requests.append(engine.add([*first, 11], GREEDY))
        engine.step()
    return [requests[i].tokens for i in (0, 1, 3)]


def equal(folder: str, size: str, dtypes: str, compiles: str) -> None:
    for dtype, compile in product(dtypes.split(","), compiles.split(",")):
        config: dict[str, Any] = {**SMALL, "target": folder, "dtype": dtype, "compile": compile, "max_batch": 3}
        alone = Runtime(EngineConfig(**config))
        runtime = Runtime(EngineConfig(**config, tensor_parallel=int(size)), ("hybrid",))
        assert all(map(torch.equal, logits_of(runtime), logits_of(alone)))
        for params in (GREEDY, SAMPLED):
            assert texts_of(runtime, "hybrid", params) == texts_of(alone, "naive", params), (dtype, compile)
        runtime.close()


def delayed(folder: str, rounds: str, most: str) -> None:
    """One of several processes, each of which comes late now and then, for so many rounds."""
    group = Delayed(join(torch.device("cpu")), float(most))
    if group.rank:
        with suppress(RankLost):
            run_tp_worker(group)
        return
    config: dict[str, Any] = {**SMALL, "target": folder, "max_batch": 2}
    alone = in_mode(Runtime(EngineConfig(**config)))
    runtime = Runtime(EngineConfig(**config, tensor_parallel=group.size), ("hybrid",), group=group)
    engine, num_rounds = in_mode(runtime, "hybrid"), 0
    for seed in count():
        params, prompts = replace(SAMPLED, max_new_tokens=100, seed=seed), [[seed % 300, 7, 8], [9]]
        ours, wanted = ([done.token_ids for done in each.generate(prompts, params)] for each in (engine, alone))
        assert ours == wanted
        num_rounds += engine.stats.steps
        if num_rounds >= int(rounds):
            break
    runtime.close()


def endless(folder: str, size: str) -> None:
    runtime = Runtime(EngineConfig(**SMALL, target=folder, tensor_parallel=int(size)), ("share",))
    engine = in_mode(runtime, "share")
    for seed in count():
        engine.generate(PROMPTS, replace(SAMPLED, seed=seed))
        if seed == 0:
            print("ready", flush=True)


def idle(folder: str, size: str) -> None:
    runtime = Runtime(EngineConfig(**SMALL, target=folder, tensor_parallel=int(size)))
    in_mode(runtime)
    print("ready", flush=True)
    time.sleep(1800)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
    cost_profiler.SECONDS, cost_profiler.SWEEPS = 0.0, (1, 1)  # what rounds cost is nothing to these tasks
    tasks = {"equal": equal, "delayed": delayed, "endless": endless, "idle": idle}
    sys.exit(main_guard(lambda: tasks[sys.argv[1]](*sys.argv[2:])))
