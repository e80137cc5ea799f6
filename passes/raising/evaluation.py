"""Runs parts of the ATen graph that depend on positions, sizes and constants only, such as masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from qcompile.passes.raising.aliasing import run
from qcompile.passes.raising.facts import Facts
from qcompile.passes.raising.nodes import SHAPE_ONLY, operator_name, unsupported


class PositionEvaluator:
    """Computes the values of ATen nodes for `batch` sequences of `length` tokens at positions 0, 1, ...

    Token ids are not available, only their shape. `given` are values of nodes that are not computed.
    """

    def __init__(
        self, facts: Facts, length: int, batch: int = 1, given: Mapping[fx.Node, Tensor] | None = None
    ) -> None:
        self._facts, self._length, self._batch = facts, length, batch
        self._sizes = {size: {"B": batch, "T": length}[axis] for size, axis in facts.axes.items()}
        self._values: dict[fx.Node, Any] = dict(given or {})

    def value(self, node: fx.Node) -> Any:
        """The value of `node`."""
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return torch.arange(self._length).repeat(self._batch, 1)
        if node.op == "get_attr":
            return self._facts.source.weights.mask(str(node.target))
        assert callable(node.target), node
        self._facts.require_written(node)
        if node in self._facts.rewritten:
            raise unsupported(node, "is overwritten in part, and read by an operator that qcompile has to run")
        args, kwargs = node.args, node.kwargs
        if operator_name(node) in SHAPE_ONLY:
            source: Any = node.args[0]
            empty = torch.empty(self._shape(source), dtype=source.meta["val"].dtype)
            return node.target(empty, *fx.node.map_arg(args[1:], self.value), **fx.node.map_arg(kwargs, self.value))
        return run(node, self.value)

    def zeros(self, node: fx.Node) -> Tensor:
        """Zeros in place of the values of `node`."""
        return torch.zeros(self._shape(node), dtype=node.meta["val"].dtype)

    def _shape(self, node: fx.Node) -> list[int]:
        sizes = node.meta["val"].shape
        return [size if isinstance(size, int) else int(size.node.expr.xreplace(self._sizes)) for size in sizes]
