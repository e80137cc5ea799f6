"""Salience: which output features of all linears keep 8 bits, by what rounding them to 4 does to the model's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from qcompile import gradients, numerics
from qcompile.calibration import Calibration
from qcompile.errors import UsageError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult

MIXED = "mix_4_8"
NARROW = "w4_asym_g128"


@dataclass(frozen=True)
class Salience(Pass):
    """Marks the `fraction` of output features, of all linears in mix_4_8 together, whose rounding moves the loss most.

    A feature's salience is the mean over samples of |s + s²/2|, s = gᵀ (q - c) with the gradient g of the sample's
    loss and the feature's change q - c under 4-bit rounding: Taylor's first-order term and the Fisher of the feature
    (MixLLM 3.2, equation 4). `samples` are taken of the calibration text. Without text the features of every linear
    that 4 bits move most are taken, the same share of each, which a note says. `fired` counts features marked.
    """

    name: ClassVar[str] = "salience"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False
    fraction: float = 0.1
    samples: int = 32

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise UsageError(f"salience.fraction={self.fraction}: write a share between 0 and 1")
        if self.samples < 1:
            raise UsageError(f"salience.samples={self.samples}: write 1 or more")

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        linears = [node for node in graph.calls(*gradients.LINEARS) if _format(node) == MIXED]
        if not linears:
            return PassResult(graph, 0, (f"no linear is in {MIXED}",))
        if graph.calibration is None:
            for node in linears:
                node.meta["precision"] = {**node.meta["precision"], "fraction": self.fraction}
            marked = sum(round(self.fraction * _features(node)) for node in linears)
            return PassResult(graph, marked, ("no calibration text: features are chosen by their own rounding error",))
        scores = self._scores(graph, linears, graph.calibration)
        marks = self._marks(scores)
        for node, wide in zip(linears, marks, strict=True):
            name = f"{self.name}.{node.name}.wide"
            graph.weights.add_tensor(name, wide)
            node.meta["precision"] = {**node.meta["precision"], "wide": name}
        return PassResult(graph, int(sum(int(wide.sum()) for wide in marks)))

    def _scores(self, graph: Graph, linears: list[fx.Node], calibration: Calibration) -> list[Tensor]:
        """Salience [N] of every linear's output features."""
        calibration.check_vocabulary(graph.info.vocab_size)
        key = f"salience-{calibration.fingerprint(graph, str(self.samples))}"
        kept = calibration.kept(key)
        if kept is not None:
            return kept[0]
        tokens = calibration.tokens[: self.samples]
        total = len(gradients.stretches(graph)) * len(tokens)
        done = 0

        def work() -> None:
            nonlocal done
            done += 1
            calibration.progress(self.name, done, total)

        moved = gradients.first_order(graph, tokens, dict.fromkeys(linears, _rounding_error), work)
        scores = [(moved[node] + moved[node].square() / 2).abs().mean(0) for node in linears]
        calibration.keep(key, scores, {})
        return scores

    def _marks(self, scores: list[Tensor]) -> list[Tensor]:
        """bool [N] of each linear: the largest scores over all of them."""
        joined = torch.cat(scores)
        wide = torch.zeros(len(joined), dtype=torch.bool)
        order = torch.argsort(joined, descending=True, stable=True)
        wide[order[: round(self.fraction * len(joined))]] = True
        return list(wide.split([len(score) for score in scores]))


def _format(node: fx.Node) -> str:
    return str((node.meta.get("precision") or {}).get("weight"))


def _features(node: fx.Node) -> int:
    weight: Any = node.args[1]
    return int(weight.meta["val"].shape[0])


def _rounding_error(w: Tensor) -> Tensor:
    """What rounding w [N, K] to 4 bits adds to it."""
    return numerics.dequantize_weight(numerics.quantize_weight(w, NARROW), NARROW, w.shape[1]) - w
