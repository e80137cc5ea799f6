"""Metrics of the HTTP server, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from qcompile.runtime.outputs import RequestOutput

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Occupancy(Protocol):
    """How busy a server is: running and waiting samples, and the share of the KV cache's pages in use."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_pages_used_ratio(self) -> float: ...


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, occupancy: Occupancy) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(_Gauges(occupancy))
        self.responses = Counter("qcompile_responses", "HTTP responses.", ["path", "status"], registry=registry)
        self._prompt = Counter("qcompile_prompt_tokens", "Tokens of answered prompts.", registry=registry)
        self._cached = Counter("qcompile_cached_prompt_tokens", "Of them, taken from the KV cache.", registry=registry)
        self._generated = Counter("qcompile_generated_tokens", "Tokens generated.", registry=registry)
        self._samples = Counter("qcompile_samples", "Samples, by how they ended.", ["finish_reason"], registry=registry)
        self._drafted = Counter("qcompile_drafted_tokens", "Tokens that drafts proposed.", registry=registry)
        self._accepted = Counter("qcompile_accepted_tokens", "Of them, those kept.", registry=registry)
        self._first_token = Histogram(
            "qcompile_time_to_first_token_seconds", "From arrival.", buckets=_SECONDS, registry=registry
        )
        self._per_token = Histogram(
            "qcompile_time_per_output_token_seconds", "After the first.", buckets=_TOKEN_SECONDS, registry=registry
        )
        self._total = Histogram("qcompile_request_seconds", "From arrival.", buckets=_SECONDS, registry=registry)

    def finished(self, output: RequestOutput) -> None:
        """Count a prompt that was completed."""
        times, samples = output.metrics, output.outputs
        self._prompt.inc(len(output.prompt_token_ids))
        self._cached.inc(times.cached_tokens)
        self._generated.inc(output.generated_tokens)
        for sample in samples:
            self._samples.labels(sample.finish_reason).inc()
        if times.first_token_time:  # else only the prompt's log probabilities were asked for
            self._first_token.observe(times.first_token_time - times.arrival_time)
        self._total.observe(times.finished_time - times.arrival_time)
        if (most := max(len(sample.token_ids) for sample in samples)) > 1:
            self._per_token.observe(times.decode_seconds / (most - 1))
        if output.speculation:
            self._drafted.inc(sum(output.speculation.drafted))
            self._accepted.inc(sum(output.speculation.accepted))

    def cancelled(self, output: RequestOutput) -> None:
        """Count a prompt that was cancelled: its client left, its logits are not finite, or the server shuts down."""
        self._generated.inc(output.generated_tokens)
        for sample in output.outputs:
            self._samples.labels(sample.finish_reason).inc()

    def text(self) -> bytes:
        """All metrics in the text format."""
        return generate_latest(self.registry)


class _Gauges:
    """Gauges, read when metrics are requested."""

    def __init__(self, occupancy: Occupancy) -> None:
        self._occupancy = occupancy

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield one metric family for each gauge."""
        now = self._occupancy
        yield GaugeMetricFamily("qcompile_running_samples", "Being computed.", now.running)
        yield GaugeMetricFamily("qcompile_waiting_samples", "Not yet.", now.waiting)
        yield GaugeMetricFamily("qcompile_kv_pages_used_ratio", "Of the KV cache's pages.", now.kv_pages_used_ratio)
