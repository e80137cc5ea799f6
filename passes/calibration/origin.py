"""Run the float model beside a model being rounded, to compensate for errors of earlier layers.

After rounded layers, the input of a linear is x' instead of the float model's x. Rounding its weight w for x' would
approximate w x', including the errors of earlier layers. The best approximation of w x is w R x' with
R = E[x x'ᵀ] E[x' x'ᵀ]⁻¹, so w R is rounded instead (QEP, Arai and Ichikawa 2025; GPTAQ, Li et al. 2025, is similar).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.formats.activations import dequantize_activation
from qcompile.formats.rounding import Parts
from qcompile.graph import Graph
from qcompile.passes.calibration import gptq
from qcompile.passes.calibration.sweep import Sweep

TOKENS = 16384
"""Tokens of calibration text for the float model: R needs some per input, but not all there are."""

_WEIGHTS = ("quantize_weight", "quantize_mixed", "upper_nibble")
_READERS = ("gemm", "expert_gemm")


def unrounded(graph: Graph) -> Graph:
    """`graph` (at stage quantize) with unrounded weights and activations, and its nodes in the same order."""
    graph = graph.clone()
    for node in graph.calls("quantize_activation"):
        ops.set_operands(node, kind="f32", group=0)
    for node in graph.calls(*_READERS):
        source: Any = ops.operand(node, "weight")
        while ops.name_of(source.target) in _WEIGHTS:
            source = source.args[0]  # w of a rounding, weight of upper_nibble
        ops.set_operands(node, weight=graph.call_weight("quantize_weight", source, "f32"), format="f32")
        if ops.has_operand(node, "activation"):  # experts quantize their inputs themselves
            ops.set_operands(node, activation="f32", group=0)
    return graph


class Origin:
    """A run of the float model that stops at the same linears as the run of the rounded model."""

    def __init__(self, graph: Graph, tokens: Tensor) -> None:
        """`tokens` int64 [samples, length], of which about the first TOKENS are used; `graph` is at stage quantize."""
        exact = unrounded(graph)
        self._twins = dict(zip(graph.calls(*_READERS), exact.calls(*_READERS), strict=True))
        self._sweep = Sweep(exact, tokens[: max(1, TOKENS // tokens.shape[1])])

    def advance(self, stop: fx.Node) -> None:
        """Advance to the linear `stop` of the rounded graph."""
        self._sweep.advance(self._twins[stop])

    def values(self, linear: fx.Node) -> list[Parts]:
        """Inputs, per sample used, of the linear at which both runs stopped, or of one that reads the same value."""
        return self._sweep.values(ops.operand(self._twins[linear], "x"))


def restoring(values: list[Parts], exact: list[Parts], damping: float) -> Tensor:
    """R, f32 [K, K], from a linear's inputs (parts of activations) in some samples and in the float model.

    R - I is estimated on each half of the samples, tested on the other half, and scaled down to what that confirms: to
    nothing if the change by earlier layers is only noise. Raises ValueError if the moments cannot be inverted.
    """
    k = values[0][0].shape[-1]
    halves = [_Change(torch.zeros(k, k), torch.zeros(k, k), torch.zeros(())) for _ in range(2)]
    for number, (parts, whole) in enumerate(zip(values, exact, strict=False)):
        seen, was = _rows(parts), _rows(whole)
        if len(exact) > 1:
            halves[number % 2].add(was, seen)
        elif len(seen) > 1:  # a single sample is split in half
            for half, rows in zip(halves, zip(was.chunk(2), seen.chunk(2), strict=True), strict=True):
                half.add(*rows)
    if not all(half.tokens for half in halves):
        return torch.eye(k)
    solutions = [half.solved(damping) for half in halves]
    confirmed = sum(float((way * other.drift).sum()) for way, other in zip(solutions, halves[::-1], strict=True))
    taken = sum(float(((way @ other.moments) * way).sum()) for way, other in zip(solutions, halves[::-1], strict=True))
    share = min(1.0, confirmed / taken) if confirmed > 0 else 0.0
    if not share:
        return torch.eye(k)
    for sum_, other in zip(*halves, strict=True):
        sum_.add_(other)
    result = halves[0].solved(damping).mul_(share)
    result.diagonal().add_(1.0)
    return result


def _rows(parts: Parts) -> Tensor:
    return dequantize_activation(parts).flatten(0, -2).float()  # [tokens, K]


class _Change(NamedTuple):
    """Sums over tokens, f32 [K, K]: `moments` x' x'ᵀ and `drift` (x - x') x'ᵀ; `tokens` [] is their number."""

    moments: Tensor
    drift: Tensor
    tokens: Tensor

    def add(self, was: Tensor, seen: Tensor) -> None:
        """Add tokens with float inputs `was` (x) and rounded-model inputs `seen` (x'), [tokens, K] each."""
        self.moments.addmm_(seen.T, seen)
        self.drift.addmm_((was - seen).T, seen)
        self.tokens.add_(len(seen))

    def solved(self, damping: float) -> Tensor:
        """R - I, f32 [K, K], shrunk for the number of tokens (gptq.trusted)."""
        tokens = int(self.tokens)
        matrix = gptq.trusted(self.moments / tokens, tokens).double()
        matrix.diagonal().add_(damping * (float(matrix.diagonal().mean()) or 1.0))
        lower, problem = torch.linalg.cholesky_ex(matrix)
        if problem or not bool(torch.isfinite(lower).all()):
            raise ValueError("second moments of the inputs are not finite, or damping too small to invert them")
        share = gptq.belief(len(matrix), tokens) / tokens
        return torch.cholesky_solve(self.drift.T.double().mul_(share), lower).T.float().contiguous()
