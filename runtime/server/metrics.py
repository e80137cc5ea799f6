"""Metrics of the HTTP server, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.server.exchanges import note
from qcompile.runtime.speculation.explained import GammaFacts

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Occupancy(Protocol):
    """How busy a server is: running and waiting samples, the share of the KV cache's pages in use, its sleep, and what
    `auto` knows of drafts."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_pages_used_ratio(self) -> float: ...
    @property
    def asleep(self) -> bool: ...
    @property
    def drafting(self) -> Sequence[GammaFacts]: ...


class Metrics:
    """The metrics of one server, in a registry of their own. model: the model's name, a label of all metrics."""

    def __init__(self, occupancy: Occupancy, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.registry.register(_Gauges(occupancy, model))
        self._responses = self._counter("qcompile_responses", "HTTP responses.", "path", "status")
        self._prompt = self._counter("qcompile_prompt_tokens", "Tokens of answered prompts.").labels(model)
        self._cached = self._counter("qcompile_cached_prompt_tokens", "Of them, taken from the KV cache.").labels(model)
        self._generated = self._counter("qcompile_generated_tokens", "Tokens generated.").labels(model)
        self._samples = self._counter("qcompile_samples", "Samples, by how they ended.", "finish_reason")
        self._embedded = self._counter("qcompile_embeddings", "Texts embedded.").labels(model)
        self._embedded_tokens = self._counter("qcompile_embedding_tokens", "Tokens of them.").labels(model)
        self._drafted = self._counter("qcompile_drafted_tokens", "Tokens that drafts proposed.").labels(model)
        self._accepted = self._counter("qcompile_accepted_tokens", "Of them, those kept.").labels(model)
        self._queued = self._seconds("qcompile_queue_seconds", "From arrival to the first step.")
        self._first_token = self._seconds("qcompile_time_to_first_token_seconds", "From arrival.")
        self._per_token = self._seconds(
            "qcompile_time_per_output_token_seconds", "After the first.", buckets=_TOKEN_SECONDS
        )
        self._total = self._seconds("qcompile_request_seconds", "From arrival.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self.registry)

    def _seconds(self, name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry).labels(self._model)

    def responded(self, path: str, status: int) -> None:
        """Count a response. path: the pattern of the path, as every label is kept for as long as the server runs."""
        self._responses.labels(self._model, path, status).inc()

    def finished(self, output: RequestOutput) -> None:
        """Count a prompt that was completed, and note it in the record of its request."""
        note(output)
        times, samples = output.metrics, output.outputs
        self._prompt.inc(len(output.prompt_token_ids))
        self._cached.inc(times.cached_tokens)
        self._generated.inc(output.generated_tokens)
        for sample in samples:
            self._samples.labels(self._model, sample.finish_reason).inc()
        if times.first_scheduled_time:
            self._queued.observe(times.first_scheduled_time - times.arrival_time)
        if times.first_token_time:  # else only the prompt's log probabilities were asked for
            self._first_token.observe(times.first_token_time - times.arrival_time)
        self._total.observe(times.finished_time - times.arrival_time)
        if (most := max(len(sample.token_ids) for sample in samples)) > 1:
            self._per_token.observe(times.decode_seconds / (most - 1))
        if output.speculation:
            self._drafted.inc(sum(output.speculation.drafted))
            self._accepted.inc(sum(output.speculation.accepted))

    def embedded(self, texts: int, tokens: int) -> None:
        """Count texts that were embedded, and their tokens."""
        self._embedded.inc(texts)
        self._embedded_tokens.inc(tokens)

    def cancelled(self, tokens: int, reasons: Sequence[str]) -> None:
        """Count a prompt that was cancelled: its client left, its logits are not finite, or the server shuts down.

        tokens: those generated. reasons: how its samples ended.
        """
        self._generated.inc(tokens)
        for reason in reasons:
            self._samples.labels(self._model, reason).inc()

    def text(self) -> bytes:
        """All metrics in the text format."""
        return generate_latest(self.registry)


class _Gauges:
    """Gauges, read when metrics are requested."""

    def __init__(self, occupancy: Occupancy, model: str) -> None:
        self._occupancy, self._model = occupancy, model

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield one metric family for each gauge."""
        now = self._occupancy
        yield self._gauge("qcompile_running_samples", "Being computed.", now.running)
        yield self._gauge("qcompile_waiting_samples", "Not yet.", now.waiting)
        yield self._gauge("qcompile_kv_pages_used_ratio", "Of the KV cache's pages.", now.kv_pages_used_ratio)
        yield self._gauge("qcompile_asleep", "Whether the model sleeps.", now.asleep)
        yield from self._drafting(now.drafting)

    def _drafting(self, known: Sequence[GammaFacts]) -> Iterator[GaugeMetricFamily]:
        """What `auto` has chosen, and the speed relative to plain decoding that it expects and measures."""
        labels = ["model_name", "batch", "context"]
        gamma = GaugeMetricFamily("qcompile_draft_gamma", "Tokens that `auto` drafts per round.", labels=labels)
        gains = [
            GaugeMetricFamily(
                f"qcompile_draft_gain_{kind}", f"Speed of rounds over plain steps, {kind}.", labels=labels
            )
            for kind in ("expected", "measured")
        ]
        for facts in known:
            place = [self._model, str(facts.batch), str(facts.context)]
            gamma.add_metric(place, facts.gamma)
            for family, each in zip(gains, (facts.expected, facts.measured), strict=True):
                if each:
                    family.add_metric(place, each[facts.gamma] if facts.gamma else max(each.values()))
        yield from (gamma, *gains)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
