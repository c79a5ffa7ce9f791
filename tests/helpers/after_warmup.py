"""Checks that nothing is compiled or captured after warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from compile.cuda_graphs import Graphs


@contextmanager
def no_captures() -> Iterator[None]:
    """Raise RuntimeError on captures inside the context."""
    yield from _no_new(lambda: Graphs.num_captures, "CUDA graphs were captured")


@contextmanager
def no_recompiles() -> Iterator[None]:
    """Raise RuntimeError on compilation inside the context."""
    from torch._dynamo.utils import counters

    yield from _no_new(lambda: counters["stats"]["unique_graphs"], "graphs were compiled")


def _no_new(count: Callable[[], int], what: str) -> Iterator[None]:
    before = count()
    yield
    if new := count() - before:
        raise RuntimeError(f"{new} {what} after warm-up")
