"""Prometheus metrics, with vLLM's names under the prefix `sharesd:`, and their sum over replicas."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from serve.choice_state import Choice
from serve.engine_thread import Output, RoundEvent, ServedModel

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LONG_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
PER_ROUND = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Metrics of one server, in a separate registry."""

    def __init__(self, model_name: str, kv_use: Callable[[], float]) -> None:
        """Create the metrics; `kv_use` returns the used share of the KV cache."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._model = model_name
        self._running = self._gauge("num_requests_running", "Choices that have a row")
        self._waiting = self._gauge("num_requests_waiting", "Choices that wait for a row")
        self._gauge("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all").set_function(kv_use)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, those found in the cache included")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens that were looked for in the cache")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens that were found in the cache")
        self._success = self._counter("request_success", "Choices that ended", "finished_reason")
        self._failures = self._counter("request_failure", "Choices that an error ended")
        self._gone = self._counter("http_requests_client_disconnected", "Requests whose client hung up")
        self._rejections = self._counter("admission_rejections", "Requests for which there was no place", "reason")
        self._first = self._histogram("time_to_first_token_seconds", "Until the first tokens of a choice", SECONDS)
        self._gap = self._histogram("inter_token_latency_seconds", "Between rounds of a choice, per token", SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "Until the end of a choice", LONG_SECONDS)
        self._queued = self._histogram("request_queue_time_seconds", "Until a choice got its row", LONG_SECONDS)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From a choice's row to its first tokens", LONG_SECONDS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first tokens of a choice to its last", LONG_SECONDS
        )
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a choice", TOKENS)
        self._length = self._histogram("request_generation_tokens", "Tokens of a choice", TOKENS)
        self._iteration = self._histogram("iteration_tokens_total", "Tokens of a round, of all rows", PER_ROUND)
        self._speculation = [_Speculation(self._registry, model_name, prefix) for prefix in ("sharesd", "vllm")]
        self._by_drafter = self._counter(
            "spec_decode_num_accepted_tokens_per_drafter", "Accepted draft tokens", "drafter"
        )

    def exposition(self) -> bytes:
        """Return the text of `GET /metrics`."""
        return generate_latest(self._registry)

    def loaded(self, model: ServedModel) -> None:
        """Say which kernels run, and what rows take."""
        info = Gauge("sharesd:kernels_info", "Kernels that run", (*LABELS, "kernels"), registry=self._registry)
        info.labels(*self._own, model.kernels).set(1)
        self._gauge("kv_cache_bytes", "Bytes of keys and values, of all rows").set(model.kv_bytes)
        self._gauge("recurrent_state_bytes", "Bytes that recurrent layers keep of all rows").set(model.state_bytes)

    def round(self, event: RoundEvent) -> None:
        """Record a step of the engine."""
        self._running.set(event.num_running)
        self._waiting.set(event.num_waiting)
        if event.outputs:
            self._iteration.observe(sum(len(output.chunk.token_ids) for output in event.outputs))

    def count_output(self, output: Output, gap: float | None) -> None:
        """Count a choice's tokens.

        `gap`: seconds since the choice's previous tokens; None for the first.
        """
        choice, chunk, num_drafted, admitted = output
        num_tokens = len(chunk.token_ids)
        self._generation_tokens.inc(num_tokens)
        if gap is None:
            self._began(choice)
        else:
            self._gap.observe(gap / max(1, num_tokens))
        if num_drafted:
            num_accepted = chunk.sources.count("accepted")
            for counters in self._speculation:
                counters.round(num_drafted, num_accepted)
        for drafter, num in Tally(filter(None, chunk.drafters)).items():
            self._by_drafter.labels(*self._own, drafter).inc(num)
        if chunk.error is not None:
            self._failures.inc()
        elif chunk.finish_reason is not None:
            self._ended(choice, admitted)

    def rejected(self, reason: str) -> None:
        """Count a request refused because the queue was full."""
        self._rejections.labels(*self._own, reason).inc()

    def disconnected(self) -> None:
        """Count a client that disconnected before the end of the answer."""
        self._gone.inc()

    def _began(self, choice: Choice) -> None:
        assert choice.first is not None
        self._first.observe(choice.first - choice.began)
        self._prompt_tokens.inc(len(choice.prompt))
        self._queries.inc(len(choice.prompt))
        self._hits.inc(choice.cached_tokens)
        self._prompt_length.observe(len(choice.prompt))

    def _ended(self, choice: Choice, admitted: float) -> None:
        assert choice.first is not None and choice.last is not None
        self._success.labels(*self._own, choice.finish_reason).inc()
        self._whole.observe(choice.last - choice.began)
        self._queued.observe(admitted - choice.began)
        self._prefill.observe(choice.first - admitted)
        self._decode.observe(choice.last - choice.first)
        self._length.observe(len(choice.token_ids))

    @property
    def _own(self) -> tuple[str, str]:
        return self._model, "0"

    def _gauge(self, name: str, text: str) -> Gauge:
        return _bound(Gauge(f"sharesd:{name}", text, LABELS, registry=self._registry), self._own)

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        """Return a counter; its own labels have values per use."""
        counter = Counter(f"sharesd:{name}", text, (*LABELS, *labels), registry=self._registry)
        return counter if labels else _bound(counter, self._own)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"sharesd:{name}", text, LABELS, buckets=buckets, registry=self._registry)
        return _bound(histogram, self._own)


LABELS = ("model_name", "engine")
"""Labels of vLLM's metrics; there is one engine."""


def _bound(metric: Any, values: tuple[str, str]) -> Any:
    return metric.labels(*values)


class _Speculation:
    """Four counters under one prefix, from which clients compute acceptance."""

    def __init__(self, registry: CollectorRegistry, model_name: str, prefix: str) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}:spec_decode_{name}", text, (*LABELS, *labels), registry=registry)

        own = self._own = (model_name, "0")
        self._drafts = counter("num_drafts", "Rounds of choices that verified a draft").labels(*own)
        self._drafted = counter("num_draft_tokens", "Draft tokens that were verified").labels(*own)
        self._accepted = counter("num_accepted_tokens", "Draft tokens that were accepted").labels(*own)
        self._by_place = counter("num_accepted_tokens_per_pos", "Accepted draft tokens, by their place", "position")
        self._at: list[Counter] = []

    def round(self, num_drafted: int, num_accepted: int) -> None:
        self._drafts.inc()
        self._drafted.inc(num_drafted)
        self._accepted.inc(num_accepted)
        while len(self._at) < num_accepted:
            self._at.append(self._by_place.labels(*self._own, str(len(self._at))))
        for counter in self._at[:num_accepted]:
            counter.inc()


EARLIEST = ("_created", "_start_time_seconds")
"""Suffixes of start times: the sum has the earliest."""
MEAN = "_perc"
"""Suffix of ratios: the sum has the mean."""


class MetricsSum:
    """Metrics of running replicas, and counts of those that have stopped."""

    def __init__(self) -> None:
        self._last: dict[str, list[Metric]] = {}
        """Id of a replica -> its metrics when they were last seen."""

    def exposition(self, found: Mapping[str, bytes]) -> bytes:
        """Return the sum of `found`, metrics by id of replica.

        Counters and histograms of earlier replicas are kept, so that they never decrease.
        """
        self._last |= {name: list(text_string_to_metric_families(text.decode())) for name, text in found.items()}
        registry = CollectorRegistry()
        metrics = [
            metric
            for name, metrics in self._last.items()
            for metric in metrics
            if name in found or metric.type in ("counter", "histogram") or metric.name.endswith("_created")
        ]
        registry.register(_Fixed(_summed(metrics)))
        return generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _summed(metrics: Iterable[Metric]) -> list[Metric]:
    sums: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], list[float]]] = {}
    for metric in metrics:
        total = sums.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        by_sample = values.setdefault(metric.name, {})
        for sample in metric.samples:
            by_sample.setdefault((sample.name, frozenset(sample.labels.items())), []).append(sample.value)
    for name, total in sums.items():
        for (sample_name, labels), found in values[name].items():
            total.add_sample(sample_name, dict(labels), _combined(sample_name, found))
    return list(sums.values())


def _combined(name: str, values: list[float]) -> float:
    if name.endswith(EARLIEST):
        return min(values)
    return sum(values) / (len(values) if name.endswith(MEAN) else 1)
