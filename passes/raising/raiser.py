"""Raise: rewrite the ATen operators of torch.export as qcompile:: operators over token-major tensors.

The graph is walked once. Every ATen tensor is one of

- a `Value`: features of a raised tensor, or a function of the position (passes/raising/values.py);
- a `Weight`: computed from parameters and constants only, and evaluated on demand;
- an `Opaque`: not understood yet. This is an error only when an operator needs its meaning, so that the parts of a
  norm, a mask or a softmax can be recognized later, from the operator that uses them.

Rules match operators (passes/raising/aten.py) and dataflow (passes/raising/patterns.py, passes/raising/attention.py),
never the names of modules, classes or parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.errors import PassError, UnsupportedError
from qcompile.graph import Graph, WeightStore
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.raising import values
from qcompile.passes.raising.nodes import Arguments, draws, operator_name, rounds, run, unwritten_reader, writes_alone
from qcompile.passes.raising.slots import is_one_slot, merging
from qcompile.passes.raising.values import Value

LENGTHS = {"B": 1_000_003, "T": 1_000_033}
"""Stand-in sizes of batch and tokens during shape analysis: primes that divide no size of a model."""

EXAMPLE = {"B": 2, "T": 7}
"""Sizes of the meta tensors in node.meta["val"] of the raised graph."""


@dataclass(frozen=True)
class Weight:
    """A tensor that the ATen node `node` computes from parameters and constants only."""

    node: fx.Node


@dataclass(frozen=True)
class Opaque:
    """The tensor of `node`, which has no meaning of its own to raising."""

    node: fx.Node


@dataclass(frozen=True)
class Spread(Opaque):
    """The weight `weight` repeated over the batch, as in decompositions of a linear."""

    weight: fx.Node


Known = Value | Weight | Opaque | Tensor | int | float | bool | None | Sequence[Any]


@dataclass(frozen=True)
class Raise(Pass):
    """ATen to qcompile:: operators; raises UnsupportedError with the node if there is no equivalent."""

    name: ClassVar[str] = "raise"
    requires: ClassVar[tuple[str, ...]] = ("import",)
    ensures: ClassVar[str] = "raise"

    def run(self, graph: Graph) -> PassResult:
        raiser = Raiser(graph)
        raised = raiser.run()
        return PassResult(raised, len(raised.calls()), tuple(raiser.notes))


class Raiser:
    """The walk over one graph: `known` maps ATen nodes to what they are, `out` is the graph being built."""

    def __init__(self, source: Graph) -> None:
        self.source = source
        self.out = Graph(fx.Graph(), WeightStore(dict(source.weights.entries)), source.info, "raise")
        self.known: dict[fx.Node, Known] = {}
        self.made: dict[tuple[Any, ...], fx.Node] = {}
        self.proven: dict[tuple[Any, ...], Any] = {}
        self.notes: list[str] = []
        self.columns: dict[str, Any] = {}
        self.axes: dict[Any, str] = {}
        self.symbols: dict[Any, int] = {}
        self.lengths: dict[Any, int] = {}
        self.token_ids: fx.Node | None = None

    def run(self) -> Graph:
        self._inputs()
        for node in self.source.fx.nodes:
            if node.op == "get_attr":
                self.known[node] = Weight(node)
            elif node.op == "call_function":
                self.known[node] = self._call(node)
        result = self.source.output.args[0]
        logits = self.require(result, "the output")
        if logits.dims != ("B", "T", "F"):
            raise self.unsupported(result, "is not logits [batch, tokens, vocabulary]")
        self.out.fx.output(self.emit(logits, logits.sizes, result))
        self.out.erase_dead()
        return self.out

    def _inputs(self) -> None:
        names = ("token_ids", "positions")
        given = self.source.inputs
        shapes = [node.meta["val"].shape for node in given]
        whole = all(node.meta["val"].dtype in (torch.int64, torch.int32) for node in given)
        if not whole or not 1 <= len(given) <= 2 or any(len(shape) != 2 for shape in shapes):
            raise UnsupportedError("a model must take token ids int64 [B, T], and positions [B, T] if it wants them")
        if any(isinstance(size, int) for size in shapes[0]):
            raise UnsupportedError("the exported program has fixed sizes; export with dynamic batch and tokens")
        for shape in shapes:
            for size, axis in zip(shape, "BT", strict=True):
                self.axes[size.node.expr] = axis
        self.symbols = {size: LENGTHS[axis] for size, axis in self.axes.items()}
        made = [self.out.fx.placeholder(name) for name in names]
        for node in made:
            node.meta["val"] = torch.empty(EXAMPLE["B"], EXAMPLE["T"], dtype=torch.int64, device="meta")
        self.token_ids = given[0]
        self.known[given[0]] = Opaque(given[0])
        self.positions = made[1]
        if len(given) == 2:
            self.known[given[1]] = Value(None, ("B", "T"), values.make_terms((), kind=values.POSITION))
        self.ids = made[0]

    def _call(self, node: fx.Node) -> Known:
        from qcompile.passes.raising.complex import HANDLERS
        from qcompile.passes.raising.joined import filled

        value = node.meta.get("val")
        if draws(node):
            raise self.unsupported(node, "draws at random; only models that always compute the same are compiled")
        changes = operator_name(node) != "detach" and not writes_alone(node)
        if self.is_constant(node) and not changes and (not isinstance(value, Tensor) or self.is_static(value)):
            self.require_written(node)
            return Weight(node)
        if not isinstance(value, (Tensor, list, tuple)):
            return None
        if (copied := filled(self, node)) is not None:
            return copied
        if changes:
            raise self.unsupported(node, "changes a tensor in place that others read afterwards")
        if rounds(node) and any(isinstance(self.known.get(source), Value) for source in node.all_input_nodes):
            raise self.unsupported(node, f"rounds to {node.meta['val'].dtype}, where the model is compiled in float32")
        handler = HANDLERS.get(operator_name(node))
        found = handler(self, node, Arguments(node)) if handler else None
        return Opaque(node) if found is None else found

    # ---- queries -------------------------------------------------------------------------------

    def is_constant(self, node: fx.Node) -> bool:
        """Whether `node` is computed from weights and numbers only."""
        return all(isinstance(self.known.get(n), Weight) for n in node.all_input_nodes)

    def is_static(self, value: Tensor) -> bool:
        """Whether no size of `value` is symbolic."""
        return all(isinstance(size, int) for size in value.shape)

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
        if expression not in self.lengths:
            self.lengths[expression] = int(expression.xreplace(self.symbols))
        return self.lengths[expression]

    def value(self, node: Any) -> Value | None:
        """`node` as a Value; a weight becomes a table of constants. None if it is neither."""
        known = self.known.get(node) if isinstance(node, fx.Node) else None
        if isinstance(known, Weight):
            return self.table(known)
        return known if isinstance(known, Value) else None

    def require(self, node: Any, reader: str) -> Value:
        """`node` as a Value. If it is none, raises UnsupportedError with the node at which understanding ended."""
        value = self.value(node)
        if value is None:
            raise self.blame(node, reader)
        return value

    def require_written(self, node: fx.Node) -> None:
        """Raise UnsupportedError if `node` is new memory that something reads before all of it is written."""
        if reader := unwritten_reader(node):
            raise self.unsupported(node, f"is new memory, and {reader} reads it before all of it is written")

    def table(self, weight: Weight) -> Value:
        """A weight's values as a table of constants."""
        data = self.evaluate(weight.node).double().numpy()
        dims = tuple("F" if size > 1 else "" for size in data.shape)
        sizes = [size for size in data.shape if size > 1]
        return Value(None, dims, values.make_terms(sizes, coef=data.reshape(sizes)))

    def number(self, item: Any) -> float | None:
        """`item` as a number, if it is one or a weight with a single element; None otherwise."""
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            return float(item)
        known = self.known.get(item) if isinstance(item, fx.Node) else None
        if not isinstance(known, Weight):
            return None
        value = item.meta["val"]
        if not isinstance(value, Tensor):
            return float(self.evaluate(item))
        return float(self.evaluate(item).reshape(()).item()) if value.numel() == 1 else None

    def evaluate(self, node: fx.Node) -> Any:
        """The value of a node that depends, directly or as a known Weight, on weights and numbers only."""
        known = self.known.get(node)
        if isinstance(known, Weight) and known.node is not node:
            return self.evaluate(known.node)
        if node.op == "get_attr":
            return self.source.evaluate(node)
        return run(node, self.evaluate)

    def limit(self, node: fx.Node, longest: int) -> None:
        """Reduce the context to at most `longest` tokens, since `node` selects other values beyond that."""
        if longest < self.out.info.max_position:
            self.out.info = replace(self.out.info, max_position=longest)
            self.notes.append(f"node {node}: chooses other values beyond {longest} tokens, so the context ends there")

    # ---- errors --------------------------------------------------------------------------------

    def unsupported(self, node: Any, reason: str) -> UnsupportedError:
        """The error that `node` cannot be compiled, with the module it came from."""
        operator = operator_name(node) if isinstance(node, fx.Node) else node
        return PassError("raise", str(node), f"{operator} {reason}{_origin(node)}")

    def blame(self, node: Any, reader: str) -> UnsupportedError:
        """The error for reading `node`; it names the first node upstream that was not understood."""
        while isinstance(node, fx.Node):
            inputs = [n for n in node.all_input_nodes if n is not self.token_ids]
            deeper = [n for n in inputs if isinstance(self.known.get(n), Opaque)]
            if not deeper:
                break
            node = deeper[0]
        return self.unsupported(node, f"has no counterpart here, and {reader} needs it")

    # ---- building ------------------------------------------------------------------------------

    def call(self, name: str, *args: Any) -> fx.Node:
        """qcompile::name(*args) in the raised graph; equal calls share one node."""
        key = (name, *(tuple(a) if isinstance(a, list) else a for a in args))
        if key not in self.made:
            self.made[key] = self.out.call(name, *args)
        return self.made[key]

    def weight(self, node: fx.Node) -> fx.Node:
        """The node of the raised graph that reads the weight `node`, possibly computed from other weights."""
        if node.op == "get_attr":
            return self.read(str(node.target))
        source = next(iter(sources(node)), None)
        name = f"{source.target if source else 'computed:'}.{node.name}"  # no module has a name with a colon
        if name not in self.out.weights:
            value = node.meta["val"]
            dtype = torch.float32 if value.is_floating_point() else value.dtype
            self.out.weights.add(name, value.shape, dtype, lambda: self.evaluate(node).to(dtype).contiguous())
        return self.read(name)

    def vector(self, node: fx.Node) -> fx.Node:
        """The weight `node` as [F]; its only dimension of more than 1 element must be the features."""
        value = node.meta["val"]
        if value.dim() == 1 and value.is_floating_point():
            return self.weight(node)
        return self._derived(node, "flat", (value.numel(),), lambda w: w.flatten().float())  # also of whole numbers

    def transposed(self, node: fx.Node) -> fx.Node:
        """The weight `node` [K, N] as [N, K]; undoes a transpose instead of adding one."""
        dims = [d % 2 for d in node.args[1:3]] if operator_name(node) == "transpose" else []  # type: ignore[operator]
        if operator_name(node) in ("t", "numpy_T") or dims in ([0, 1], [1, 0]) or _is_swap(node):
            return self.weight(node.args[0])  # type: ignore[arg-type]
        shape = node.meta["val"].shape
        return self._derived(node, "T", (shape[1], shape[0]), lambda w: w.t())

    def turned(self, node: fx.Node) -> fx.Node:
        """The weight `node` [E, K, N] as [E, N, K]."""
        experts, k, n = node.meta["val"].shape
        return self._derived(node, "T", (experts, n, k), lambda w: w.transpose(1, 2))

    def matrix(self, node: fx.Node, rows: int, columns: int) -> fx.Node:
        """The weight `node` as [rows, columns]; all its other dimensions must be 1."""
        shape = node.meta["val"].shape
        if len(shape) == 2 and rows == 0:
            return self.weight(node)
        size = (int(shape[rows]), int(shape[columns]))
        return self._derived(node, "rows", size, lambda w: w.movedim((rows, columns), (0, 1)).reshape(size))

    def product_rows(self, node: fx.Node, order: Sequence[int], rows: int) -> fx.Node:
        """The weight `node`, its dimensions permuted to `order`, as a matrix of `rows` rows."""
        shape = node.meta["val"].shape
        if len(shape) == 2 and rows == shape[order[0]]:
            return self.weight(node) if order[0] == 0 else self.transposed(node)
        size, label = (rows, shape.numel() // rows), ".".join(map(str, order))
        return self._derived(node, f"rows{rows}.{label}", size, lambda w: w.permute(*order).reshape(size))

    def rows_from(self, node: fx.Node, start: int) -> fx.Node:
        """The rows of the weight `node` from `start` on."""
        shape = node.meta["val"].shape
        if start == 0:
            return self.weight(node)
        return self._derived(node, f"from{start}", (shape[0] - start, *shape[1:]), lambda w: w[start:])

    def proven_columns(self, embedding: fx.Node) -> Any:
        """raise_tables.prove_columns of the table that `embedding` reads; cached."""
        from qcompile.passes.raising.tables import prove_columns

        name = str(embedding.args[1])
        if name not in self.columns:
            self.columns[name] = prove_columns(self.out.evaluate(embedding.args[1]))  # type: ignore[arg-type]
        return self.columns[name]

    def _derived(self, node: fx.Node, label: str, shape: Sequence[int], change: Callable[[Tensor], Tensor]) -> fx.Node:
        name = f"{self.weight(node).target}.{label}"
        if name not in self.out.weights:
            self.out.weights.add(name, shape, torch.float32, lambda: change(self.evaluate(node)).contiguous())
        return self.read(name)

    def constant(self, name: str, data: Tensor) -> fx.Node:
        """A node that reads `data`, stored as a weight named after `name`; equal data is stored once."""
        key = ("constant", name, data.numpy().tobytes())
        if key not in self.made:
            unique = name
            while unique in self.out.weights:
                unique = f"{name}.{len(self.made)}"
            self.out.weights.add_tensor(unique, data)
            self.made[key] = self.read(unique)
        return self.made[key]

    def read(self, name: str) -> fx.Node:
        """The node of the raised graph that reads the weight `name` from its store."""
        if ("read", name) not in self.made:
            self.made["read", name] = self.out.weight(name)
        return self.made["read", name]

    def emit(self, value: Value, sizes: Sequence[int], node: Any) -> fx.Node:
        """The raised tensor [B, T, *sizes] that holds the features of `value` in their order.

        Raises UnsupportedError naming `node` if there is no such tensor.
        """
        coefs = np.unique(value.terms["coef"])
        if not value.is_plain() or len(coefs) != 1 or len(sizes) > 2:
            raise self.unsupported(node, "mixes features in a way that has no counterpart here")
        assert value.base is not None
        if not value.base.meta["val"].is_floating_point():
            raise self.unsupported(node, "computes with indices, which are compiled to choose experts alone")
        index = value.terms["index"].ravel()
        made = self.select_features(value.base, index, node)
        made = self.shaped(made, tuple(sizes))
        return made if coefs[0] == 1 else self.call("scale", made, float(coefs[0]))

    def select_features(self, base: fx.Node, index: np.ndarray[Any, Any], node: Any) -> fx.Node:
        """The features `index` of `base`, flattened unless they are all of them in order."""
        count = math.prod(features(base))
        start, kind = int(index[0]), ops.name_of(base.target)
        if kind != "gather_features" and np.array_equal(index, np.arange(start, start + len(index))):
            if len(index) == count:
                return base
            if kind != "expert_linear" or not is_one_slot(base):
                return self.call("slice_features", self.flat(base), start, start + len(index))
        if kind == "expert_linear":
            return self._expert_rows(base, index, node)
        flat = self.flat(base)
        if ops.name_of(flat.target) != "linear" or flat.args[1].op != "get_attr":  # type: ignore[union-attr]
            from qcompile.passes.raising.joined import gathered

            return gathered(self, flat, index, node)
        return self.call("linear", flat.args[0], *(self._rows(w, index) for w in flat.args[1:] if w is not None))

    def _expert_rows(self, base: fx.Node, index: np.ndarray[Any, Any], node: Any) -> fx.Node:
        """The features `index` of every slot of an expert linear, selected as rows of its weights."""
        slots, width = features(base)
        wanted = index.reshape(slots, -1) - np.arange(slots)[:, None] * width
        x, chosen, weight, *bias = base.args
        if (wanted != wanted[0]).any() or weight.op != "get_attr":  # type: ignore[union-attr]
            raise self.unsupported(node, "takes other features of one chosen expert than of the next")
        return self.call("expert_linear", x, chosen, *(self._rows(w, wanted[0], 1) for w in (weight, *bias)))

    def _rows(self, weight: Any, index: np.ndarray[Any, Any], axis: int = 0) -> fx.Node:
        """The rows `index` (along `axis`) of a weight, as a new weight."""
        key = ("rows", weight, index.tobytes())
        if key not in self.made:
            source = str(weight.target)
            name = f"{source}.rows{sum(k[0] == 'rows' for k in self.made)}"
            rows, shape = torch.from_numpy(index.copy()), list(weight.meta["val"].shape)
            shape[axis] = len(index)
            store = self.out.weights
            store.add(name, shape, weight.meta["val"].dtype, lambda: store[source].index_select(axis, rows))
            self.made[key] = self.read(name)
        return self.made[key]

    def flat(self, node: fx.Node) -> fx.Node:
        """`node` [B, T, ...] as [B, T, F]."""
        return self.shaped(node, (math.prod(features(node)),))

    def shaped(self, node: fx.Node, sizes: tuple[int, ...]) -> fx.Node:
        """`node` with its features split into heads, or merged, to match `sizes`."""
        if features(node) == sizes:
            return node
        if len(features(node)) == 2:
            split = ops.name_of(node.target) == "split_heads"
            node = node.args[0] if split else self.call(*merging(node))  # type: ignore[assignment]
        return node if len(sizes) == 1 else self.call("split_heads", node, sizes[0])


def _is_swap(node: fx.Node) -> bool:
    return operator_name(node) == "permute" and list(node.args[1]) in ([1, 0], [-1, -2])  # type: ignore[arg-type]


def features(node: fx.Node) -> tuple[int, ...]:
    """Sizes of a raised tensor after batch and tokens."""
    return tuple(node.meta["val"].shape[2:])


def sources(node: fx.Node) -> list[fx.Node]:
    """The weights from which `node` is computed, in order."""
    if node.op == "get_attr":
        return [node]
    return [source for n in node.all_input_nodes for source in sources(n)]


def _origin(node: Any) -> str:
    """The module of the model that `node` came from, if the trace says so."""
    stack = node.meta.get("nn_module_stack") if isinstance(node, fx.Node) else None
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    path = path.removeprefix("module").removeprefix(".") or "the model itself"
    return f"; in {path} ({str(kind).rpartition('.')[2]})"
