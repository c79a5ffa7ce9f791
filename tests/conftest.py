"""What all tests share."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import guard
import pytest
from grouping import *  # noqa: F403
from grouping import INTERPRETED

from compile import native

if INTERPRETED and find_spec("triton"):
    import triton_cpu  # noqa: F401

if "GUARD_PAGES" in os.environ:
    guard.install(os.environ["GUARD_PAGES"])


@pytest.fixture(scope="session", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Load the CPU kernels before any test takes a cache folder of its own, where they would be built anew."""
    if all(item.get_closest_marker("cuda") for item in request.session.items):
        return  # nothing of them is wanted on a GPU
    with ThreadPoolExecutor() as pool:
        list(pool.map(native.library, ("bfloat16", "float16", "float32", "float64", "choice")))
