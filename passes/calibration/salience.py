"""Salience: keep 8 bits for the output features that would change the model's loss most if rounded to 4 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, fx

from qcompile import ops, roofline
from qcompile.calibration import Calibration, Kept
from qcompile.errors import UsageError
from qcompile.formats.asymmetric import W4_ASYM_G128
from qcompile.formats.mixed import MIX_4_8
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.calibration import allocate, gptq, gradients
from qcompile.passes.calibration.calibrate import Calibrate
from qcompile.passes.calibration.trial import Trial, fewest
from qcompile.passes.quantize import Quantize

NARROW = W4_ASYM_G128
"""The format of rows that are not marked."""
DAMPING = 0.01
"""GPTQ damping for scoring features: the default of `calibrate`."""
SEEN = 8
"""Number of samples from which input moments are taken to estimate the rounding error after GPTQ."""


@dataclass(frozen=True)
class Salience(Pass):
    """Marks the `fraction` of output features, over all linears in mix_4_8, that change the loss most when rounded.

    A feature's salience is the mean over samples of |s + s²/2|, where s = gᵀ (q - c), g is the gradient of the sample's
    loss and q - c the feature's change under 4-bit rounding: the first-order Taylor term and the feature's Fisher term
    (MixLLM 3.2, equation 4; only the latter without `first_order`). `samples` counts calibration samples. With
    `compensated`, the change is the one that remains after clipping and GPTQ instead of rounding to nearest, because
    these help some linears far more than others. Without calibration text, each linear keeps 8 bits for the same share
    of its features, those with the largest rounding error, and a note says so. `fired` counts marked features.

    With `target_bits`, blocks of features are chosen by salience per predicted time on `target`
    (passes/calibration/allocate.py) until codes have that many bits on average. With `max_perplexity_increase`, as few
    as possible are chosen such that the perplexity of held-out calibration text rises by no more than that over the
    float model (passes/calibration/trial.py). Raises QualityError if even 8 bits throughout do not suffice.
    """

    name: ClassVar[str] = "salience"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False
    fraction: float = 0.1
    samples: int = 32
    first_order: bool = True
    compensated: bool = True
    target_bits: float = 0.0
    max_perplexity_increase: float = 0.0
    target: str = "cpu"

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise UsageError(f"salience.fraction={self.fraction}: write a share between 0 and 1")
        if self.samples < 1:
            raise UsageError(f"salience.samples={self.samples}: write 1 or more")
        if self.target_bits and not allocate.NARROW_BITS <= self.target_bits <= allocate.WIDE_BITS:
            raise UsageError(f"salience.target_bits={self.target_bits}: codes have 4 or 8 bits, write a mean of those")
        if not 0 <= self.max_perplexity_increase < math.inf:
            raise UsageError(f"salience.max_perplexity_increase={self.max_perplexity_increase}: write 0.05, or more")
        roofline.peaks_of(self.target)  # raises UsageError for an unknown target

    @property
    def automatic(self) -> bool:
        """Whether bits are allocated by salience per time instead of to a fixed fraction of the features."""
        return bool(self.target_bits or self.max_perplexity_increase)

    @property
    def wanted(self) -> bool:
        return self.enabled or self.automatic

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        mixed = [node for node in graph.calls(*gradients.LINEARS) if _marks_rows(node)]
        linears = [node for node in mixed if not _is_marked(node)]
        kept = tuple(f"node {node.name}: keeps rows that an earlier pass marked" for node in mixed if _is_marked(node))
        result = PassResult(graph, 0) if kept and not linears else self._marked(graph, linears)
        return replace(result, notes=(*kept, *result.notes))

    def _marked(self, graph: Graph, linears: list[fx.Node]) -> PassResult:
        """`graph` with rows of `linears` marked."""
        if not linears:
            if self.automatic:
                raise UsageError(
                    f"bits are allocated to linears in {MIX_4_8.name}, and none is: take recipe auto or mixllm"
                )
            return PassResult(graph, 0, (f"no linear is in {MIX_4_8.name}",))
        if graph.calibration is None:
            return self._by_rounding_error(graph, linears)
        scores = self._scores(graph, linears, graph.calibration)
        if self.automatic:
            return self._allocate(graph, linears, scores, graph.calibration)
        return PassResult(graph, _mark(graph, linears, self._marks(scores)))

    def _by_rounding_error(self, graph: Graph, linears: list[fx.Node]) -> PassResult:
        """Without calibration text: mark the same share of every linear."""
        if self.max_perplexity_increase:
            raise UsageError("max-perplexity-increase is judged on calibration text: give --calib FILE")
        fraction = allocate.share_of(self.target_bits) if self.target_bits else self.fraction
        for node in linears:
            node.meta["precision"] = {**node.meta["precision"], "fraction": fraction}
        marked = sum(round(fraction * _features(node)) for node in linears)
        return PassResult(graph, marked, ("no calibration text: features are chosen by their own rounding error",))

    def _allocate(
        self, graph: Graph, linears: list[fx.Node], scores: list[Tensor], calibration: Calibration
    ) -> PassResult:
        """Allocate 8 bits to blocks by salience per time, until `target_bits` or `max_perplexity_increase` is met."""
        sizes = [_features(node) for node in linears]
        inputs = [_inputs(node) for node in linears]
        weights = sum(n * k for n, k in zip(sizes, inputs, strict=True))
        blocks = allocate.ranked(scores, inputs, roofline.peaks_of(self.target))

        notes: tuple[str, ...] = ()
        if self.max_perplexity_increase:
            trial = Trial(graph, calibration, (Quantize(), Calibrate()))

            def increase(count: int) -> float:
                marked = graph.clone()
                _mark(marked, _counterparts(marked, linears), allocate.marks(blocks[:count], sizes))
                return trial.increase(marked)

            count, expected = fewest(len(blocks), self.max_perplexity_increase, increase)
            notes = (f"perplexity of held-back calibration text rises by {expected:.4f}",)
        else:
            count = allocate.within_bits(blocks, weights, self.target_bits)
        marked = _mark(graph, linears, allocate.marks(blocks[:count], sizes))
        bits = allocate.NARROW_BITS + sum(block.bits for block in blocks[:count]) / weights
        return PassResult(graph, marked, (f"codes have {bits:.3f} bits on average", *notes))

    def _scores(self, graph: Graph, linears: list[fx.Node], calibration: Calibration) -> list[Tensor]:
        """Salience [N] of the output features of every linear."""
        calibration.check_vocabulary(graph.info.vocab_size)
        options = f"{self.samples} {self.first_order} {self.compensated}"
        key = f"salience-{calibration.fingerprint(graph.content(), options)}"
        kept = calibration.kept(key)
        if kept is not None:
            return kept.tensors
        tokens = calibration.tokens[: self.samples]
        total = len(gradients.stretches(graph)) * len(tokens)
        done = 0

        def work() -> None:
            nonlocal done
            done += 1
            calibration.progress(self.name, done, total)

        change, seen = (_compensated_error, SEEN) if self.compensated else (_rounding_error, 0)
        moved = gradients.first_order(graph, tokens, dict.fromkeys(linears, change), work, seen)
        order = float(self.first_order)
        scores = [(order * moved[node] + moved[node].square() / 2).abs().mean(0) for node in linears]
        calibration.keep(key, Kept(scores, {}))
        return scores

    def _marks(self, scores: list[Tensor]) -> list[Tensor]:
        """bool [N] per linear: the features with the largest scores over all linears."""
        joined = torch.cat(scores)
        wide = torch.zeros(len(joined), dtype=torch.bool)
        order = torch.argsort(joined, descending=True, stable=True)
        wide[order[: round(self.fraction * len(joined))]] = True
        return list(wide.split([len(score) for score in scores]))


def _mark(graph: Graph, linears: list[fx.Node], marks: list[Tensor]) -> int:
    """Record on the linears which of their features keep 8 bits; returns how many do."""
    for node, wide in zip(linears, marks, strict=True):
        name = f"{Salience.name}.{node.name}.wide"
        graph.weights.add_tensor(name, wide)
        node.meta["precision"] = {**node.meta["precision"], "wide": name}
    return sum(int(wide.sum()) for wide in marks)


def _counterparts(graph: Graph, nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes with the same names in a clone."""
    named = {node.name: node for node in graph.nodes}
    return [named[node.name] for node in nodes]


def _marks_rows(node: fx.Node) -> bool:
    """Whether the format of a linear keeps more bits for marked rows."""
    precision = node.meta.get("precision")
    return precision is not None and weight_format(precision["weight"]).marks_rows


def _is_marked(node: fx.Node) -> bool:
    """Whether an earlier pass has chosen the rows with more bits, or their share."""
    return bool({"wide", "fraction"} & node.meta["precision"].keys())


def _features(node: fx.Node) -> int:
    return int(ops.operand(node, "weight").meta["val"].shape[0])


def _inputs(node: fx.Node) -> int:
    return int(ops.operand(node, "weight").meta["val"].shape[1])


def _rounding_error(w: Tensor, moments: Tensor | None = None) -> Tensor:
    """The change of w [N, K] under rounding to nearest in 4 bits."""
    return NARROW.dequantize(NARROW.quantize(w), w.shape[1]) - w


def _compensated_error(w: Tensor, moments: Tensor | None) -> Tensor:
    """The change of w when clipping and GPTQ choose the codes, for inputs with second moments [K, K]."""
    assert moments is not None
    choice = gptq.choose(w, moments, NARROW.rounding(), clip=True, gptq=True, damping=DAMPING)
    return NARROW.dequantize(choice.parts, w.shape[1]) - w
