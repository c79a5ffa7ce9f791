"""Sum of the metrics of all replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

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
