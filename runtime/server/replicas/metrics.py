"""Metrics of several replicas as one text: those of each with the label `replica`, and the router's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


class RouterMetrics:
    """The router's own metrics. model: the model's name, a label of all."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        labels = ["model_name", "replica"]
        self._ready = Gauge("qcompile_replica_ready", "Whether it answers.", labels, registry=self.registry)
        self._running = Gauge("qcompile_replica_requests", "Requests in flight.", labels, registry=self.registry)
        self._restarts = Counter("qcompile_replica_restarts", "Starts after an end.", labels, registry=self.registry)
        self._lost = Counter("qcompile_lost_requests", "In flight as it ended.", labels, registry=self.registry)
        own = ["model_name", "status"]
        self._responses = Counter("qcompile_router_responses", "HTTP responses.", own, registry=self.registry)
        self._model = model

    def observe(self, replica: int, ready: bool, in_flight: int) -> None:
        """Note how a replica is now."""
        self._ready.labels(self._model, replica).set(ready)
        self._running.labels(self._model, replica).set(in_flight)
        self._restarts.labels(self._model, replica).inc(0)  # shown from the beginning on, so that rates are known
        self._lost.labels(self._model, replica).inc(0)

    def restarted(self, replica: int) -> None:
        """Count a start of a replica that had ended."""
        self._restarts.labels(self._model, replica).inc()

    def lost(self, replica: int) -> None:
        """Count a request that was in flight on a replica as that ended."""
        self._lost.labels(self._model, replica).inc()

    def responded(self, path: str, status: int) -> None:
        """Count a response to a client."""
        self._responses.labels(self._model, status).inc()

    def text(self, replicas: Mapping[int, str]) -> bytes:
        """All metrics in the text format. replicas: the text of each replica that answered."""
        return merged(replicas) + generate_latest(self.registry)


def merged(texts: Mapping[int, str] | Mapping[str, str]) -> bytes:
    """The metrics of several texts in one, each with its key as the label `replica`."""
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry)


class _Merged:
    """The metrics of several texts, each with the label `replica`."""

    def __init__(self, texts: Mapping[int, str] | Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once, with the samples of all replicas."""
        metrics: dict[str, Metric] = {}
        for number, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                metric = metrics.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    metric.add_sample(sample.name, sample.labels | {"replica": str(number)}, sample.value)
        yield from metrics.values()

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before it is collected."""
        return ()
