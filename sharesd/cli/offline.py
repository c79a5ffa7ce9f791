"""Answers by this process or by replicas, with a progress bar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from multigpu.data_parallel import LocalTaskQueue, Numbered, Replica, function_of, run_tasks
from multigpu.ray_cluster import RayReplicas
from sharesd.cli.console import loading_bars


@contextmanager
def answering(
    work: str,
    settings: Any,
    tasks: Sequence[Numbered],
    replicas: Iterable[Replica] | RayReplicas | None,
    *,
    max_assigned: int,
) -> Iterator[Iterator[Numbered]]:
    """Yield results of `work` (`module:function`), by `replicas` or by this process."""
    with loading_bars() as progress:
        if replicas is None:
            results = function_of(work)(settings, LocalTaskQueue(tasks), progress)
        elif isinstance(replicas, RayReplicas):
            results = replicas.run_tasks(work, settings, tasks, max_assigned=max_assigned)
        else:
            results = run_tasks(tasks, list(replicas), max_assigned=max_assigned)

        def shown() -> Iterator[Numbered]:
            progress("answering", 0, len(tasks))
            for done, result in enumerate(results, 1):
                yield result
                progress("answering", done, len(tasks))

        with closing(results):  # type: ignore[type-var]
            yield shown()
