"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from compile import native
from tests.helpers import guard
from tests.helpers.grouping import *  # noqa: F403
from tests.helpers.grouping import INTERPRETED

if INTERPRETED and find_spec("triton"):
    from tests.helpers import triton_cpu  # noqa: F401

if "GUARD_PAGES" in os.environ:
    guard.install(os.environ["GUARD_PAGES"])


@pytest.fixture(scope="session", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Load the CPU kernels before any test takes a cache folder of its own, where they would be built anew."""
    if all(item.get_closest_marker("cuda") for item in request.session.items):
        return  # nothing of them is wanted on a GPU
    with ThreadPoolExecutor() as pool:
        list(pool.map(native.library, ("bfloat16", "float16", "float32", "float64", "choice")))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of small operations: more threads only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def close_after() -> Iterator[list[Any]]:
    """What is put there is closed, which lets go of files and memory."""
    runtimes: list[Any] = []
    yield runtimes
    for runtime in runtimes:
        runtime.close()


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept on disk goes away (the kernels' library is loaded before)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARESD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
