"""Two replicas under Ray Serve: the tests of one server, replicas that die, hang-ups, failures of loading."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from inspect import getsource, signature
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install '.[ray]'")
pytest.importorskip("anthropic")

import ray  # noqa: E402

from serve.cluster.deployment import open_cluster  # noqa: E402
from serve.cluster.options import NumReplicas  # noqa: E402
from serve.server import OpenBackend  # noqa: E402
from tests.helpers.served_model import Served, served  # noqa: E402
from tests.serve import (  # noqa: E402
    test_anthropic_api,
    test_json_schemas,
    test_responses_api,
    test_serve,
    test_serve_errors,
    test_serve_streams,
    test_serve_tools,
)

pytestmark = [pytest.mark.long, pytest.mark.subprocess]
TWO = NumReplicas(2, 2)
KINDS: dict[str, tuple[tuple[ModuleType, ...], dict[str, Any], dict[str, str]]] = {
    "plain": ((test_serve, test_serve_errors, test_serve_streams), {"settings": {"max_queue": 28}}, {}),
    "tools": (
        (test_serve_tools, test_json_schemas),
        {"template": test_serve_tools.TOOL_TEMPLATE, "max_context": 2048},
        test_serve_tools.SCRIPTS,
    ),
    "dialects": (
        (test_anthropic_api, test_responses_api),
        {"template": test_responses_api.TEMPLATE, "max_context": 2048},
        test_responses_api.SCRIPTS,
    ),
}
"""Modules whose tests run here against replicas, how they are served, and what the engine says."""
HOLDS_TESTS = {module.__name__: kind for kind, (modules, *_) in KINDS.items() for module in modules}


def looks_inside(source: str) -> bool:
    """Tests that look into the process of the engine cannot run here."""
    return any(word in source for word in ("engine.added", "prompt_of(", "monkeypatch"))


for _module in [module for modules, *_ in KINDS.values() for module in modules]:
    for _name, _test in list(vars(_module).items()):
        if _name.startswith("test_") and "server" in signature(_test).parameters and not looks_inside(getsource(_test)):
            globals()[f"{_name}_{_module.__name__.rpartition('.')[2].removeprefix('test_')}"] = _test


@pytest.fixture(scope="module")
def cluster() -> Iterator[OpenBackend]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield open_cluster(TWO, "cpu")
    ray.shutdown()
    if before is None:
        del os.environ["OMP_NUM_THREADS"]


@pytest.fixture(scope="module")
def served_kinds(cluster: OpenBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """Servers by kind, started when they are first asked for."""
    with ExitStack() as stack:

        @cache
        def of_kind(kind: str) -> Served:
            _, options, scripts = KINDS[kind]
            path = str(tmp_path_factory.mktemp(kind) / "scripts.json")
            running = stack.enter_context(served(open_backend=cluster, scripts=path, **options))
            running.engine.scripts |= scripts
            return running

        yield of_kind


@pytest.fixture
def server(request: pytest.FixtureRequest, served_kinds: Callable[[str], Served]) -> Served:
    return served_kinds(HOLDS_TESTS.get(request.function.__module__, "plain"))
