"""Trial quantization: choose codes on a little calibration text and measure perplexity on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qcompile.calibration import Calibration, Kept
from qcompile.errors import QualityError, UsageError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, apply
from qcompile.passes.calibration.sweep import Sweep

SEEN_TOKENS, HELD_TOKENS = 16384, 8192
"""Tokens that choose a trial's codes, and tokens that measure its perplexity. The build itself uses more text, so
the estimate of a trial is conservative."""

TRIALS = 6
"""Maximum number of trials between the two extremes: no 8-bit features, and 8 bits throughout."""


class Trial:
    """Perplexity increase over the float model when the passes `rounding` quantize a graph.

    It is measured on the last samples of `calibration`; the first ones choose codes. The error of a low-bit cache is
    not included. Results are kept with the calibration.
    """

    def __init__(self, graph: Graph, calibration: Calibration, rounding: Sequence[Pass]) -> None:
        samples, length = calibration.tokens.shape
        if samples < 2:
            raise UsageError(
                "a limit on perplexity needs 2 samples of calibration text: one to choose by, one to judge"
            )
        held = max(1, min(samples // 2, HELD_TOKENS // length))
        seen = max(1, min(samples - held, SEEN_TOKENS // length))
        self._held, self._seen = calibration.tokens[-held:], calibration.tokens[:seen]
        self._calibration, self._rounding = calibration, rounding
        self._float = loss(graph, self._held)

    def increase(self, graph: Graph) -> float:
        """The perplexity increase when the linears of `graph` are quantized at their assigned precisions."""
        key = f"trial-{self._calibration.fingerprint(graph.content(), _precisions(graph))}"
        kept = self._calibration.kept(key)
        if kept is not None:
            return kept.figures["increase"]
        trial = graph.clone()
        trial.calibration = Calibration(self._seen)
        for step in self._rounding:
            trial = apply(step, trial).graph
        increase = math.exp(loss(trial, self._held)) - math.exp(self._float)
        self._calibration.keep(key, Kept([], {"increase": increase}))
        return increase


def _precisions(graph: Graph) -> str:
    """The indices of the wide output features of all linears, as text."""
    names = [str(node.meta["precision"].get("wide")) for node in graph.nodes if "precision" in node.meta]
    marks = [graph.weights[name] for name in names if name in graph.weights]
    return str([mark.nonzero().flatten().tolist() for mark in marks])


def loss(graph: Graph, tokens: Tensor, finest: bool = False) -> float:
    """Mean next-token loss in nats of `tokens` int64 [samples, length]; holds one linear's weights at a time.

    finest: weights in two planes have both; otherwise only the upper one, for which calibration chooses codes.
    """
    sweep = Sweep(graph, tokens, finest=finest)
    total = 0.0
    for row, logits in zip(tokens, sweep.finish(), strict=True):
        total += float(torch.nn.functional.cross_entropy(logits[0, :-1].float(), row[1:]))
    return total / len(tokens)


def fewest(most: int, limit: float, increase: Callable[[int], float]) -> tuple[int, float]:
    """The smallest count in 0..most with an increase of at most `limit`, and that increase.

    The result is near the smallest one: the number of trials is limited.

    Bisects on the square root of the count, because the first features bring the largest gains. Raises QualityError if
    even `most` features do not suffice.
    """
    least = increase(0)
    if least <= limit:
        return 0, least
    low, high, best = 0, most, increase(most)
    if best > limit:
        raise QualityError(
            f"max-perplexity-increase {limit:g} cannot be kept: "
            f"8 bits wherever they may be raise perplexity by {best:.4f} on held-back calibration text"
        )
    for _ in range(TRIALS):
        middle = round(((low**0.5 + high**0.5) / 2) ** 2)
        if middle in (low, high):
            break
        tried = increase(middle)
        if tried <= limit:
            high, best = middle, tried
        else:
            low = middle
    return high, best
