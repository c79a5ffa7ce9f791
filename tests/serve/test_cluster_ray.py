"""Two replicas under Ray Serve: the tests of one server, replicas that die, hang-ups, failures of loading.

mark.smoke
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from inspect import getsource, signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install '.[ray]'")
pytest.importorskip("anthropic")

import ray

from serve.cluster.deployment import ConversationRouter, RayServeReplicas, open_cluster
from serve.cluster.ingress import DIED
from serve.cluster.options import ROWS, NumReplicas
from serve.server import OpenBackend
from serve.server_config import ServerSettings
from tests.helpers.fake_engine import fake_model
from tests.helpers.serve_requests import CHAT, TEXT
from tests.helpers.served_model import Served, served
from tests.serve.common import stream

pytestmark = [pytest.mark.long, pytest.mark.subprocess]
TWO = NumReplicas(2, 2)
RUNNING = 'sharesd:num_requests_running{engine="0",model_name="fake"}'
KINDS: dict[str, tuple[str, ...]] = {
    "plain": ("serve", "serve_errors", "serve_streams"),
    "tools": ("serve_tools",),
    "dialects": ("responses_api", "anthropic_api"),
}
"""Modules whose tests run here against replicas, which are served as the first of them says."""
MODULES = {kind: [import_module(f"tests.serve.test_{name}") for name in names] for kind, names in KINDS.items()}
HOLDS_TESTS = {module.__name__: kind for kind, modules in MODULES.items() for module in modules}


def looks_inside(source: str) -> bool:
    """Tests that look into the process of the engine cannot run here."""
    return any(word in source for word in ("engine.added", "prompt_of(", "monkeypatch"))


for _module in [module for modules in MODULES.values() for module in modules]:
    for _name, _test in list(vars(_module).items()):
        if _name.startswith("test_") and "server" in signature(_test).parameters and not looks_inside(getsource(_test)):
            globals()[f"{_name}_{_module.__name__.rpartition('.')[2].removeprefix('test_')}"] = _test


class NamedReplica(NamedTuple):
    unique_id: str


@pytest.fixture(scope="module")
def cluster() -> Iterator[OpenBackend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield open_cluster(TWO, "cpu")
        ray.shutdown()


@pytest.fixture(scope="module")
def served_kinds(cluster: OpenBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """Servers by kind, started when they are first asked for."""
    with ExitStack() as stack:

        @cache
        def of_kind(kind: str) -> Served:
            first, path = MODULES[kind][0], str(tmp_path_factory.mktemp(kind) / "scripts.json")
            running = stack.enter_context(served(open_backend=cluster, scripts=path, **first.SERVED))
            running.engine.scripts |= getattr(first, "SCRIPTS", {})
            return running

        yield of_kind


@pytest.fixture
def server(request: pytest.FixtureRequest, served_kinds: Callable[[str], Served]) -> Served:
    return served_kinds(HOLDS_TESTS.get(request.function.__module__, "plain"))


def replicas_of(name: str) -> list[psutil.Process]:
    """Processes of the replicas of one server."""
    processes = psutil.process_iter(["cmdline"])
    return [one for one in processes if f"ServeReplica:{name}" in "".join(one.info["cmdline"] or ())]


def test_turns_of_a_conversation_find_their_prefix(server: Served) -> None:
    for number in range(12):
        talk = [{"role": "user", "content": f"the cat {number}"}]
        first = server.post(CHAT, messages=talk, max_tokens=5).json()
        talk += [first["choices"][0]["message"], {"role": "user", "content": "why"}]
        usage = server.post(CHAT, messages=talk, max_tokens=5).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]


def test_requests_go_to_replicas_with_free_rows() -> None:
    """Of which an engine may have fewer than were asked for."""
    names = [NamedReplica("one"), NamedReplica("three")]
    replicas = [SimpleNamespace(replica_id=names[i], routing_stats={ROWS: rows}) for i, rows in enumerate((1, 3))]
    asked = SimpleNamespace(args=[SimpleNamespace(conversation="the cat")])

    def chosen(*running: int) -> set[str]:
        router: Any = SimpleNamespace(replica_queue_len_cache=dict(zip(names, running, strict=True)))
        *free, _ = asyncio.run(ConversationRouter.choose_replicas(router, replicas, asked))  # type: ignore[arg-type]
        return {each.replica_id.unique_id for (each,) in free}

    assert chosen(0, 2) == {"one", "three"} and chosen(1, 2) == {"three"} and not chosen(1, 3)


def test_replicas_say_how_many_rows_their_engines_have(cluster: OpenBackend) -> None:
    replicas: list[RayServeReplicas] = []

    def open_backend(settings: ServerSettings, load: Any) -> Any:
        backend, app = cluster(settings, load)
        replicas.append(backend._replicas)  # type: ignore[attr-defined]
        return backend, app

    def load() -> Any:
        return replace(fake_model(max_batch=1), num_rows=1)

    def known() -> list[dict[str, int]]:
        router = replicas[0]._handle._router._asyncio_router.request_router  # type: ignore[union-attr]
        return [] if router is None else [each.routing_stats for each in router.curr_replicas.values()]

    with served(load, {"max_batch": 4}, open_backend) as server:
        server.wait(lambda: server.http.get("/health").status_code == 200)
        assert server.complete(max_tokens=2)
        server.wait(lambda: known() == [{ROWS: 1}] * 2)


def test_a_client_that_hangs_up_frees_its_row(cluster: OpenBackend) -> None:
    gone = 'sharesd:http_requests_client_disconnected_total{engine="0",model_name="fake"}'
    with served(open_backend=cluster, delay=0.05) as server:
        body = {"prompt": "the cat", "max_tokens": 200, "stream": True}
        with server.http.stream("POST", TEXT, json=body) as response:
            assert next(response.iter_bytes())
            assert server.metrics()[RUNNING] == 1
        server.wait(lambda: server.metrics()[gone] == 1 and server.metrics()[RUNNING] == 0)


def test_only_what_was_streaming_is_lost_with_a_replica(cluster: OpenBackend) -> None:
    names: list[str] = []

    def open_named(settings: ServerSettings, load: Any) -> Any:
        backend, app = cluster(settings, load)
        names.append(backend._replicas._name)  # type: ignore[attr-defined]
        return backend, app

    options: Any = {"open_backend": open_named, "delay": 0.02, "settings": {"max_batch": 4}}
    with served(**options) as server, ThreadPoolExecutor(16) as pool:

        def ask(number: int) -> str | None:
            """The text, or None if its stream broke with an error."""
            body = {"prompt": f"the cat {number}", "max_tokens": 40, "seed": number, "speculate": False}
            if number % 2:
                return server.complete(**body)["choices"][0]["text"]
            found = stream(server, **body)
            if "error" in found[-1]:
                assert found[-1]["error"]["message"] == DIED
                return None
            return "".join(one["choices"][0]["text"] for one in found)

        whole = list(pool.map(ask, range(32)))
        assert None not in whole
        first, _ = replicas_of(names[0])
        again = [pool.submit(ask, number) for number in range(32)]
        server.wait(lambda: server.metrics()[RUNNING] > 4)
        first.kill()
        found = [answer.result() for answer in again]
        lost = [number for number, text in enumerate(found) if text is None]
        assert all(text == whole[number] for number, text in enumerate(found) if number not in lost)
        assert len(lost) <= 4, "a replica has four rows"
        server.wait(lambda: len(replicas_of(names[0])) == 2)
        success = 'sharesd:request_success_total{engine="0",finished_reason="length",model_name="fake"}'
        assert server.metrics()[success] >= 32, "counts of a replica that has ended are kept"


def test_a_model_that_cannot_be_loaded_is_named(cluster: OpenBackend) -> None:
    settings = ServerSettings(model_name="m", root="m", mode="naive")
    replicas = RayServeReplicas(TWO, "cpu", settings, partial(fake_model, color="red"))
    with pytest.raises(ValueError, match="^TypeError: .* unexpected keyword argument 'color'$"):
        replicas.start()
    replicas.stop()
