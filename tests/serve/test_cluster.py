"""The ingress of a cluster: repeated and ended answers, routing, sums of metrics, options. Without Ray."""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from multigpu import ray_cluster
from serve.cluster.ingress import DIED, Cluster, ReplicaDied, conversation_of, make_ingress, preference
from serve.cluster.options import NumReplicas, deployment_options, replicas_type
from serve.cluster.replica import Forwarded, ServeReplica
from serve.command import main
from serve.metrics import Metrics, MetricsSum
from serve.routes.generation import KEEP_ALIVE
from serve.server_config import ServerSettings
from tests.helpers.fake_engine import fake_model
from tests.helpers.serve_requests import CHAT, TEXT, error_of
from tests.helpers.served_model import Served, served
from tests.serve.common import MESSAGES, bodies, events, stream

BODIES = bodies()


class OneReplica:
    """A replica in the server's process, which dies where `dies` says: after so many messages of each try."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings, self.dies, self.comments = settings, list[int](), 0
        self.requests: list[Forwarded] = []
        self.replica: ServeReplica

    def start(self) -> None: ...

    def stop(self) -> None: ...

    async def answer(self, request: Forwarded) -> AsyncIterator[list[Any]]:
        self.requests.append(request)
        left = self.dies.pop(0) if self.dies else None
        async for messages in (await self._replica()).answer(request):
            for message in messages:
                if left == 0:
                    raise ReplicaDied
                left = left and left - 1
                yield [message]
                if message["type"] == "http.response.start":
                    for _ in range(self.comments):
                        yield [{"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}]

    async def of_each(self, method: str) -> list[Any]:
        return [await getattr(await self._replica(), method)()]

    async def _replica(self) -> ServeReplica:
        if not hasattr(self, "replica"):
            self.replica = ServeReplica.__new__(ServeReplica)
            await self.replica.__init__(self.settings, fake_model, "no such folder")  # type: ignore[misc]
        return self.replica


Pair = tuple[Served, OneReplica]


@contextmanager
def clustered(kind: type[OneReplica] = OneReplica, load: Any = None, **settings: Any) -> Iterator[Pair]:
    made: list[OneReplica] = []

    def open_backend(settings: ServerSettings, load: Any) -> Any:
        made.append(kind(replace(settings, api_keys=(), log_prompts=True)))
        cluster = Cluster(settings, made[0])
        return cluster, make_ingress(cluster)

    with served(load, settings, open_backend) as server:
        server.wait(lambda: bool(made))
        yield server, made[0]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with clustered() as found:
        yield found


def answer_of(path: str, server: Served, **more: Any) -> str:
    """The body of an answer without times and counts, which chance decides in a stream's first event."""
    found = server.http.post(path, json={**BODIES[path], **more, "temperature": 0}, headers={"x-request-id": "same"})
    assert found.status_code == 200 and found.headers["x-request-id"] == "same", found.text
    return re.sub(r'"(created(_at)?|\w*_tokens)":\d+', "", found.text)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_that_dies_before_the_first_byte_is_not_seen(path: str, stream: bool, pair: Pair) -> None:
    server, replica = pair
    answer_of(path, server, stream=stream)
    whole = answer_of(path, server, stream=stream)  # the prompt is cached from now on
    for dies in ([0], [1], [0, 1]):  # before and after the status
        replica.requests.clear()
        replica.dies = list(dies)
        assert answer_of(path, server, stream=stream) == whole
        assert len(replica.requests) == len(dies) + 1 and len(set(map(repr, replica.requests))) == 1


def test_an_answer_goes_on_after_comments(pair: Pair) -> None:
    server, replica = pair
    replica.dies, replica.comments = [1], 1
    try:
        text = server.post(TEXT, **BODIES[TEXT], stream=True, seed=3).text
    finally:
        replica.comments = 0
    plain = stream(server, **BODIES[TEXT], seed=3)
    assert text.count(KEEP_ALIVE.decode()) == 2
    assert [one["choices"] for one in events(text)] == [one["choices"] for one in plain]


def test_a_request_that_ends_three_replicas_is_an_error(pair: Pair) -> None:
    server, replica = pair
    for path, body in BODIES.items():
        replica.dies = [0, 0, 0]
        response = server.post(path, **body)
        if path == MESSAGES:
            assert response.json() == {"type": "error", "error": {"type": "overloaded_error", "message": DIED}}
        else:
            assert error_of(response, 503)["message"] == DIED


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_breaks_ends_in_its_dialect(path: str, pair: Pair) -> None:
    server, replica = pair
    replica.dies = [3]
    *events, last, rest = server.post(path, **BODIES[path], stream=True).text.split("\n\n")
    assert rest == "" and len(events) >= 1
    if path in (TEXT, CHAT):
        assert last == "data: [DONE]"
        assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == DIED
        return
    name, _, data = last.partition("\ndata: ")
    error = json.loads(data)
    assert name == "event: error" and error["type"] == "error"
    if path == MESSAGES:
        assert error["error"] == {"type": "overloaded_error", "message": DIED}
    else:
        numbers = [json.loads(line[6:])["sequence_number"] for e in [*events, last] for line in e.splitlines()[1:]]
        assert numbers == list(range(len(numbers))) and error["message"] == DIED


def test_own_routes_and_metrics(pair: Pair) -> None:
    server, _ = pair
    assert server.http.get("/health").json() == {"status": "ok"} and server.http.get("/").status_code == 200
    assert server.http.get("/version").json()["mode"] == "suffix"
    assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 256
    assert server.http.get("/v1/nothing").status_code == 404 and server.http.get(TEXT).status_code == 405
    name = 'sharesd:request_success_total{engine="0",finished_reason="length",model_name="fake"}'
    before = server.metrics()[name]
    server.complete(seed=5)
    assert server.metrics()[name] == before + 1


def test_the_ingress_checks_keys_and_bodies_and_logs(capfd: pytest.CaptureFixture[str]) -> None:
    with clustered(api_keys=("secret",), log_prompts=True) as (server, replica):
        error_of(server.post(TEXT), 401)
        server.http.headers["authorization"] = "Bearer secret"
        error_of(server.http.post(TEXT, content=b"x", headers={"content-type": "text/plain"}), 415)
        assert not replica.requests
        server.complete("the cat", seed=5)
        assert b"authorization" not in dict(replica.requests[0].scope["headers"])
    lines = [line for line in capfd.readouterr().err.splitlines() if "status=200" in line]
    assert len(lines) == 2, "of the ingress and of the replica"
    assert all(" completion_tokens=16 " in line and " seed=5 " in line and "the cat" in line for line in lines)


def test_turns_of_a_conversation_have_one_key() -> None:
    def key(**body: Any) -> str:
        return conversation_of(json.dumps(body).encode())

    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]
    later = [*first, {"role": "assistant", "content": "so"}, {"role": "user", "content": "and"}]
    assert key(messages=first) == key(messages=later, seed=4) != key(messages=later[1:])
    assert key(messages=first[1:], system="a") != key(messages=first[1:], system="b")
    assert key(input="why") == key(input=later[1:]) != key(input="who")
    text = "x" * 300
    assert key(prompt=text) == key(prompt=text + " more") != key(prompt="y" + text)
    assert key(prompt=[5] * 300) == key(prompt=[5] * 400) != key(prompt=[6] * 300)
    for nothing in (b"", b"[" * 100_000, b"[]", b"{}", b'{"messages": 3}', b'{"messages": [1, null]}', b"\xff"):
        assert isinstance(conversation_of(nothing), str)


def test_a_replica_that_goes_moves_its_conversations_alone() -> None:
    names, keys = ["a", "b", "c"], [str(number) for number in range(300)]

    def owners(among: list[str]) -> dict[str, str]:
        return {key: max(among, key=lambda name: preference(key, name)) for key in keys}

    before, after = owners(names), owners(names[:2])
    assert all(before[key] == after[key] for key in keys if before[key] != "c")
    assert all(60 < list(before.values()).count(name) < 140 for name in names)


def test_metrics_are_sums_that_never_fall() -> None:
    first, second = Metrics("m", lambda: 0.5), Metrics("m", lambda: 1.0)
    for metrics, waits in ((first, (0.3,)), (second, (0.3, 3.0))):
        for seconds in waits:
            metrics._first.observe(seconds)
            metrics.rejected("queue_full")
    total = MetricsSum()

    def values(**found: Metrics) -> dict[str, float]:
        text = total.exposition({name: one.exposition() for name, one in found.items()}).decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {sample.name + sample.labels.get("le", ""): sample.value for sample in samples}

    both = values(a=first, b=second)
    assert both["sharesd:admission_rejections_total"] == 3 and both["sharesd:kv_cache_usage_perc"] == 0.75
    buckets = [both[f"sharesd:time_to_first_token_seconds_bucket{le}"] for le in ("0.25", "0.5", "+Inf")]
    assert buckets == [0, 2, 3] and both["sharesd:time_to_first_token_seconds_sum"] == pytest.approx(3.6)
    second.rejected("queue_full")
    left = values(b=second)
    assert left["sharesd:admission_rejections_total"] == 4 and left["sharesd:kv_cache_usage_perc"] == 1.0
    texts = [text.decode() for text in (first.exposition(), total.exposition({"b": second.exposition()}))]
    headers = [{line for line in text.splitlines() if line.startswith("#")} for text in texts]
    assert headers[0] == headers[1]


def test_numbers_of_replicas() -> None:
    assert [replicas_type(text) for text in ("2", "1-8")] == [(2, 2), (1, 8)]
    for wrong in ("0", "3-2", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="give N or MIN-MAX, e.g. 2 or 1-8"):
            replicas_type(wrong)


def test_replicas_are_added_by_the_length_of_the_queue() -> None:
    settings = ServerSettings(model_name="m", root="m", mode="naive", max_batch=6, shutdown_timeout=11)
    fixed, scaled = (deployment_options(settings, NumReplicas(2, most)) for most in (2, 5))
    assert fixed["num_replicas"] == 2 and "autoscaling_config" not in fixed and "num_replicas" not in scaled
    wanted = {"min_replicas": 2, "max_replicas": 5, "target_ongoing_requests": 6}
    assert scaled["autoscaling_config"] == wanted and scaled["graceful_shutdown_timeout_s"] == 11
    config = pytest.importorskip("ray.serve.config")
    assert config.AutoscalingConfig(**wanted).get_target_ongoing_requests() == 6


def test_cores_are_shared_so_that_all_replicas_find_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = ray_cluster.cores_of_replica
    assert [cores(1, [8]), cores(2, [8, 8]), cores(3, [8, 8]), cores(4, [2])] == [8, 8, 4, 0.5]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert cores(2, [8, 8]) == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--replicas", "2"], "--replicas is 2 but --ray is missing; add --ray"),
        (["--replicas", "1-4"], "--replicas is 1-4 but --ray is missing"),
        (["--ray", "--prompt-cache", "kv"], "--prompt-cache is not supported with --ray"),
        (["--ray", "--tensor-parallel", "2"], "--tensor-parallel is not supported with --ray"),
        (["--ray", "--device", "cuda:1"], "use cuda, or drop --ray"),
        (["--ray"], "run: pip install 'sharesd[ray]'"),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main([*flags, "--port", "0"], lambda *_: pytest.fail("nothing is loaded")) == 2
    captured = capfd.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_server_ends_while_its_replicas_start() -> None:
    starts = threading.Event()

    class Slow(OneReplica):
        def start(self) -> None:
            starts.wait()

    try:
        with clustered(Slow, fake_model) as (server, _):
            for response in (server.post(TEXT, **BODIES[TEXT]), server.http.get("/health")):
                assert error_of(response, 503)["message"] == "the model is being loaded; try again later"
            assert server.http.get("/").status_code == 200
        assert server.status == 0
    finally:
        starts.set()
