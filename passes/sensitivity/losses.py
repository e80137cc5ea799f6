"""Losses: how far the logits of a text move when some linears are rounded and all others are exact.

The graph runs once in float32. Where a unit begins, the run forks for each of its formats, so that what comes before it
is computed once. Measured are the Kullback-Leibler divergence from the exact logits, in nats for each token, and the
perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.clock import Progress
from qcompile.graph import Graph
from qcompile.passes.calibration.sweep import Sweep
from qcompile.passes.gemm_precision import GEMMS, change_precision
from qcompile.passes.sensitivity.units import FormatPair, GemmUnit

STAGE = "sensitivity"


@dataclass(frozen=True)
class LogitLoss:
    """`kl`: mean divergence from the exact logits, in nats. `perplexity` of the text."""

    kl: float
    perplexity: float


class LossMeter:
    """Measures losses of `graph`, quantized with all linears in float32, on `tokens` int64 [samples, length].

    It keeps the exact logits: 4 bytes for each token and entry of the vocabulary.
    """

    def __init__(self, graph: Graph, tokens: Tensor) -> None:
        self._graph, self._tokens = graph, tokens
        with torch.no_grad():
            self._exact = [row[0].float().log_softmax(-1) for row in Sweep(graph, tokens).finish()]
        self.exact = self._loss(iter(self._exact))

    def each(
        self, units: Sequence[GemmUnit], pairs: Sequence[FormatPair], progress: Progress
    ) -> dict[tuple[GemmUnit, FormatPair], LogitLoss]:
        """The loss of each unit in each of the formats that it takes, alone."""
        sweep = Sweep(self._graph, self._tokens)
        order = {node: place for place, node in enumerate(self._graph.nodes)}
        starts = sorted(((self._start(unit), unit) for unit in units), key=lambda start: order[start[0]])
        costs = [sum(unit.weights for _, unit in starts[place:]) >> 10 for place in range(len(starts))]
        total, done = sum(costs) * len(pairs), 0
        losses = {}
        for (start, unit), cost in zip(starts, costs, strict=True):
            sweep.advance(start)
            for pair in pairs:
                if unit.takes(pair):
                    forked = sweep.fork(self._changed({unit: pair}))
                    losses[unit, pair] = self._loss(row[0].float().log_softmax(-1) for row in forked.finish())
                progress(STAGE, done := done + cost, total)
        return losses

    def mixed(self, choice: Mapping[GemmUnit, FormatPair]) -> LogitLoss:
        """The loss with all these units in these formats."""
        sweep = Sweep(self._changed(choice), self._tokens)
        return self._loss(row[0].float().log_softmax(-1) for row in sweep.finish())

    def _start(self, unit: GemmUnit) -> fx.Node:
        """The first node of a unit: what quantizes its input."""
        gemm = next(node for node in self._graph.calls(*GEMMS) if node.name == unit.node)
        source: fx.Node = ops.operand(gemm, "x")
        return source if ops.name_of(gemm.target) == "gemm" else gemm

    def _changed(self, choice: Mapping[GemmUnit, FormatPair]) -> Graph:
        """The graph with units in other formats."""
        graph = self._graph.clone()
        gemms = {node.name: node for node in graph.calls(*GEMMS)}
        activations: dict[tuple[Any, ...], fx.Node] = {}
        for unit, pair in choice.items():
            change_precision(graph, gemms[unit.node], pair.weight, pair.activation, activations, STAGE)
        graph.erase_dead()
        return graph

    @torch.no_grad()
    def _loss(self, rows: Any) -> LogitLoss:
        """The loss of the logarithms of probabilities [length, vocabulary] of each sample."""
        divergence, likelihood, tokens = 0.0, 0.0, 0
        for ids, logits, exact in zip(self._tokens, rows, self._exact, strict=True):
            divergence += float(torch.nn.functional.kl_div(logits, exact, reduction="sum", log_target=True)) / len(ids)
            likelihood -= float(logits[:-1].gather(1, ids[1:, None]).double().sum())
            tokens += len(ids) - 1
        nats = likelihood / tokens
        return LogitLoss(max(divergence / len(self._tokens), 0.0), math.exp(nats) if nats < 700 else math.inf)
