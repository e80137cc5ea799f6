"""Widen narrow linears: those with few outputs keep 8 bits, which costs little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult


@dataclass(frozen=True)
class WidenNarrow(Pass):
    """Decides 8 bits for linears with at most `features` outputs, unless an earlier pass has decided."""

    name: ClassVar[str] = "widen_narrow"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False
    features: int = 64

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        fired = 0
        for node in graph.calls("linear"):
            if node.meta["val"].shape[-1] <= self.features and not node.meta.get("precision"):
                node.meta["precision"] = {"weight": "w8_sym_channel"}
                fired += 1
        return PassResult(graph, fired)
