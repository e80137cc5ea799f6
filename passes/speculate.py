"""Speculate: add a draft path, which runs the same weights at other precisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from qcompile.errors import PassError, UsageError
from qcompile.formats.activations import ACTIVATIONS
from qcompile.formats.registry import WEIGHT_FORMATS
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.gemm_precision import GEMMS, SAME, change_precision, changeable_gemms, head_gemms
from qcompile.passes.streams import local_blocks

FORMATS = tuple(format.name for format in WEIGHT_FORMATS.values() if not format.marks_rows)
"""Weight formats of drafts. Formats with marked rows are missing: rows are marked for the target, before rounding."""
TOKENS = 128
"""Maximum number of tokens on which sensitivity is measured."""


@dataclass(frozen=True)
class Speculate(Pass):
    """A draft path: `weight` and `activation` of every linear, `head` and `head_activation` of the output head.

    `same` keeps what the target path has, so both share packed weights (QSpec 3.1). A format rounds the original
    weights once more (ML-SpecQD 3.1, direct cast). With `enabled`, the pass runs once for every draft path of the
    recipe, on the graph that `quantize` returned. Experts change like linears; routers keep their precision.

    Each linear is changed alone, to see how far that moves the logits. The `sensitive` linears that move them most take
    `sensitive_weight` and `sensitive_activation` instead (QuantSpec 5: layers that keep 8 bits), and are listed in the
    notes. Of the blocks of the residual stream that mix no positions (an MLP, experts), the draft leaves out the `skip`
    ones that move the logits least when left out alone (Zhang et al., "Draft & Verify", arXiv 2309.08168, 3.2, without
    its search). A draft keeps all mixers of positions, since it shares the target's cache and states.

    The logits are those of the first calibration sample, or of fixed random tokens without calibration text.
    """

    name: ClassVar[str] = "speculate"
    requires: ClassVar[tuple[str, ...]] = ("quantize",)
    enabled: bool = False
    weight: str = "same"
    activation: str = "same"
    head: str = "same"
    head_activation: str = "same"
    sensitive: int = 0
    sensitive_weight: str = "same"
    sensitive_activation: str = "same"
    skip: int = 0

    def __post_init__(self) -> None:
        if self.sensitive < 0:
            raise UsageError(f"speculate.sensitive={self.sensitive}: write how many linears, 0 or more")
        if self.skip < 0:
            raise UsageError(f"speculate.skip={self.skip}: write how many blocks, 0 or more")
        for format in (self.weight, self.head, self.sensitive_weight):
            if format != SAME and format not in FORMATS:
                raise UsageError(f"no draft has weight format {format}; there are same, {', '.join(FORMATS)}")
        known = sorted(ACTIVATIONS)
        for activation in (self.activation, self.head_activation, self.sensitive_activation):
            if activation not in (SAME, *known):
                raise UsageError(f"activation type {activation} is unknown; there are same, {', '.join(known)}")

    def run(self, graph: Graph) -> PassResult:
        left_out = self._least_needed(graph) if self.skip else []
        graph = _without(graph, left_out)
        kept = self._most_sensitive(graph) if self.sensitive else []
        heads = head_gemms(graph)
        activations: dict[tuple[Any, ...], fx.Node] = {}
        fired = len(left_out)
        for node in changeable_gemms(graph):
            wanted = (self.head, self.head_activation) if node in heads else (self.weight, self.activation)
            if node.name in kept:
                wanted = self.sensitive_weight, self.sensitive_activation
            fired += change_precision(graph, node, *wanted, activations, self.name)
        graph.erase_dead()
        notes = tuple(f"{name} is among the most sensitive: {self.sensitive_weight} in the draft" for name in kept)
        notes += tuple(f"{name} is left out of the draft, with what it adds" for name in left_out)
        return PassResult(graph, fired, notes)

    def _least_needed(self, graph: Graph) -> list[str]:
        """The sums of the `skip` blocks that move the logits least when left out alone, in the order they run."""
        blocks = [node.name for node, _ in local_blocks(graph, self.name)]
        if self.skip > len(blocks):
            reason = f"speculate.skip={self.skip}: the model has {len(blocks)} blocks that mix no positions"
            raise PassError(self.name, blocks[-1] if blocks else graph.output.name, reason)
        before = _logits(graph)
        moved = {name: float((_logits(_without(graph, [name])) - before).square().mean()) for name in blocks}
        least = sorted(blocks, key=lambda name: moved[name])[: self.skip]
        return [name for name in blocks if name in least]

    def _most_sensitive(self, graph: Graph) -> list[str]:
        """The gemms, heads excepted, that move the logits most when changed alone; the most sensitive first."""
        before, heads = _logits(graph), {node.name for node in head_gemms(graph)}
        moved: dict[str, float] = {}
        for name in [node.name for node in changeable_gemms(graph) if node.name not in heads]:
            alone = graph.clone()
            node = next(node for node in alone.calls(*GEMMS) if node.name == name)
            if change_precision(alone, node, self.weight, self.activation, {}, self.name):
                moved[name] = float((_logits(alone) - before).square().mean())
        return sorted(moved, key=lambda name: moved[name], reverse=True)[: self.sensitive]


def _without(graph: Graph, sums: Sequence[str]) -> Graph:
    """A copy of `graph` in which the sums with these names are the residual stream alone."""
    copy = graph.clone()
    for node, stream in local_blocks(copy, Speculate.name) if sums else ():
        if node.name in sums:
            copy.replace(node, stream)
    copy.erase_dead()
    return copy


def _logits(graph: Graph) -> Tensor:
    """Logits [1, tokens, vocab] of one text in float32, computed by the operators' reference bodies."""
    if graph.calibration is not None:
        ids = graph.calibration.tokens[:1, :TOKENS]
    else:
        drawn = torch.Generator().manual_seed(0)
        ids = torch.randint(0, graph.info.vocab_size, (1, min(TOKENS, graph.info.max_position)), generator=drawn)
    inputs = [ids, torch.arange(ids.shape[1])[None]][: len(graph.inputs)]
    with torch.no_grad():
        logits: Tensor = graph.run(*inputs, dtype=torch.float32)
    return logits
