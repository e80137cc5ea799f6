"""What raising knows of the ATen graph: the meaning of each value, and the sizes, constants and numbers in it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, fx

from qcompile.errors import UnsupportedError
from qcompile.graph import Graph
from qcompile.passes.raising import values
from qcompile.passes.raising.aliasing import run, unwritten_reader
from qcompile.passes.raising.nodes import SHAPE_ONLY, operator_name, unsupported
from qcompile.passes.raising.values import Value

LENGTHS = {"B": 1_000_003, "T": 1_000_033}
"""Stand-in sizes of batch and tokens during shape analysis: primes that divide no size of a model."""

WHOLE = (torch.int32, torch.int64)
"""Integer types wide enough for every position."""


@dataclass(frozen=True)
class Constant:
    """A tensor that the ATen node `node` computes from parameters and constants only; evaluated where needed."""

    node: fx.Node


@dataclass(frozen=True)
class Opaque:
    """The tensor of `node`, which no rule has given a meaning.

    This is an error only if an operator needs the meaning: the parts of a norm or a softmax are opaque until the last
    operator of the pattern is recognized. Subclasses say what a few rules know of such a tensor. If they know all of
    it, `understood` is true: what cannot be compiled is then a reader of the tensor.
    """

    understood: ClassVar[bool] = False
    node: fx.Node


@dataclass(frozen=True)
class Spread(Opaque):
    """The constant `weight` repeated over the batch, as in decompositions of a linear."""

    weight: fx.Node


Known = Value | Constant | Opaque | Tensor | int | float | bool | None | Sequence[Any]
"""The meaning of an ATen value: of several results, a sequence of meanings. None: not known."""


class Facts:
    """What raising knows of the ATen graph `source`; `known` maps its nodes to their meanings.

    `rewritten` are tables into which a later node writes: their meaning is that after the write.

    Raises UnsupportedError if the graph does not take token ids [B, T], and optionally positions [B, T], of dynamic
    sizes.
    """

    def __init__(self, source: Graph) -> None:
        self.source = source
        self.known: dict[fx.Node, Known] = {}
        self.rewritten: set[fx.Node] = set()
        self.axes: dict[Any, str] = {}
        self._results: dict[Hashable, Any] = {}
        self._lengths: dict[Any, int] = {}
        given = source.inputs
        shapes = [node.meta["val"].shape for node in given]
        whole = all(node.meta["val"].dtype in WHOLE for node in given)
        if not whole or not 1 <= len(given) <= 2 or any(len(shape) != 2 for shape in shapes):
            raise UnsupportedError("a model must take token ids int64 [B, T], and may take positions int64 [B, T]")
        if any(isinstance(size, int) for size in shapes[0]):
            raise UnsupportedError("the exported program has fixed sizes; export with dynamic batch and tokens")
        for shape in shapes:
            for size, axis in zip(shape, "BT", strict=True):
                self.axes[size.node.expr] = axis
        self._symbols = {size: LENGTHS[axis] for size, axis in self.axes.items()}
        self.token_ids, *positions = given
        self.known[self.token_ids] = Opaque(self.token_ids)
        for node in positions:
            self.known[node] = Value(None, ("B", "T"), values.make_terms((), kind=values.POSITION))

    @property
    def longest(self) -> int:
        """The number of positions of the model's context."""
        return self.source.info.max_position

    # ---- meanings ------------------------------------------------------------------------------

    def is_constant(self, node: fx.Node) -> bool:
        """Whether `node` is computed from constants and numbers only."""
        return all(isinstance(self.known.get(n), Constant) for n in node.all_input_nodes)

    def value(self, node: Any) -> Value | None:
        """`node` as a Value; a constant becomes a table of numbers. None if it is neither."""
        known = self.known.get(node) if isinstance(node, fx.Node) else None
        if isinstance(known, Constant):
            return self._table(known)
        return known if isinstance(known, Value) else None

    def plain(self, item: Any) -> Value | None:
        """`item` as a Value if it holds features of a raised tensor, unmixed, times one constant; else None."""
        known = self.known.get(item) if isinstance(item, fx.Node) else None
        if not isinstance(known, Value) or not known.is_plain():
            return None
        return known if len(np.unique(known.terms["coef"])) == 1 else None

    def require(self, node: Any, reader: str) -> Value:
        """`node` as a Value. Raises UnsupportedError with the first unknown node before `node` if there is none."""
        value = self.value(node)
        if value is None:
            raise self._unknown(node, reader)
        return value

    def _unknown(self, node: Any, reader: str) -> UnsupportedError:
        """The error that `reader` needs `node`; it names the first node upstream without a meaning."""
        while isinstance(node, fx.Node):
            inputs = [n for n in node.all_input_nodes if n is not self.token_ids]
            opaque = [(n, known) for n in inputs if isinstance(known := self.known.get(n), Opaque)]
            deeper = [n for n, known in opaque if not known.understood]
            if not deeper:
                break
            node = deeper[0]
        return unsupported(node, f"has no counterpart in qcompile, and {reader} needs it")

    def reads_token_ids(self, item: Any) -> bool:
        """Whether `item` depends on the values (not just the shape) of the token ids."""
        seen: set[fx.Node] = set()
        frontier = [item] if isinstance(item, fx.Node) else []
        while frontier:
            node = frontier.pop()
            if node is self.token_ids:
                return True
            if node not in seen:
                seen.add(node)
                frontier += node.all_input_nodes[1:] if operator_name(node) in SHAPE_ONLY else node.all_input_nodes
        return False

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """The result of `compute()`, which is called once for each `key`."""
        if key not in self._results:
            self._results[key] = compute()
        return self._results[key]

    # ---- sizes ---------------------------------------------------------------------------------

    def shape(self, node: fx.Node) -> list[int]:
        """The ATen shape of `node`, with LENGTHS for batch and tokens."""
        return [self.length(size) for size in node.meta["val"].shape]

    def length(self, size: Any) -> int:
        """`size`, an int or a symbolic size, with LENGTHS for batch and tokens."""
        if isinstance(size, fx.Node):
            size = size.meta["val"]
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression not in self._lengths:
            self._lengths[expression] = int(expression.xreplace(self._symbols))
        return self._lengths[expression]

    # ---- constants -----------------------------------------------------------------------------

    def number(self, item: Any) -> float | None:
        """`item` as a number, if it is one or a constant with a single element; None otherwise."""
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            return float(item)
        known = self.known.get(item) if isinstance(item, fx.Node) else None
        if not isinstance(known, Constant):
            return None
        value = item.meta["val"]
        if not isinstance(value, Tensor):
            return float(self.evaluate(item))
        return float(self.evaluate(item).reshape(()).item()) if value.numel() == 1 else None

    def evaluate(self, node: fx.Node) -> Any:
        """The value of a node that depends, directly or as a known Constant, on constants and numbers only."""
        known = self.known.get(node)
        if isinstance(known, Constant) and known.node is not node:
            return self.evaluate(known.node)
        if node.op == "get_attr":
            return self.source.evaluate(node)
        return run(node, self.evaluate)

    def require_written(self, node: fx.Node) -> None:
        """Raise UnsupportedError if `node` is new memory that another node reads before all of it is written."""
        if reader := unwritten_reader(node):
            raise unsupported(node, f"is new memory, and {reader} reads it before all of it is written")

    def _table(self, constant: Constant) -> Value:
        data = self.evaluate(constant.node).double().numpy()
        dims = tuple("F" if size > 1 else "" for size in data.shape)
        sizes = [size for size in data.shape if size > 1]
        return Value(None, dims, values.make_terms(sizes, coef=data.reshape(sizes)))


def is_static(value: Tensor) -> bool:
    """Whether no size of `value` is symbolic."""
    return all(isinstance(size, int) for size in value.shape)
