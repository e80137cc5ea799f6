"""Builds the raised graph: calls of qcompile:: operators, their weights, and selections of features."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.graph import Graph, WeightStore
from qcompile.passes import gather
from qcompile.passes.gather import Index
from qcompile.passes.raising.facts import Facts
from qcompile.passes.raising.nodes import operator_name, unsupported
from qcompile.passes.raising.slots import is_one_slot, merging
from qcompile.passes.raising.values import Value, identity

EXAMPLE = {"B": 2, "T": 7}
"""Sizes of the meta tensors in node.meta["val"] of the raised graph."""


class Builder:
    """The raised graph `out`, which has a node for each different call, weight and selection.

    Arguments called `weight` are nodes of the ATen graph that are known as Constant; results are nodes of `out`.
    """

    def __init__(self, facts: Facts) -> None:
        source = facts.source
        self.out = Graph(fx.Graph(), WeightStore(dict(source.weights.entries)), source.info, "raise")
        self.notes: list[str] = []
        self.token_ids, self.positions = (self.out.fx.placeholder(name) for name in ("token_ids", "positions"))
        for node in (self.token_ids, self.positions):
            node.meta["val"] = torch.empty(EXAMPLE["B"], EXAMPLE["T"], dtype=torch.int64, device="meta")
        self._evaluate = facts.evaluate
        self._made: dict[tuple[Any, ...], fx.Node] = {}

    def call(self, name: str, *args: Any) -> fx.Node:
        """qcompile::name(*args); equal calls share one node."""
        key = (name, *(tuple(a) if isinstance(a, list) else a for a in args))
        if key not in self._made:
            self._made[key] = self.out.call(name, *args)
        return self._made[key]

    def limit_context(self, node: fx.Node, longest: int) -> None:
        """Reduce the context to at most `longest` tokens, since `node` selects other values beyond that."""
        if longest < self.out.info.max_position:
            stated = self.out.info.stated_position or self.out.info.max_position
            self.out.info = replace(self.out.info, max_position=longest, stated_position=stated)
            self.notes.append(f"node {node}: selects other values beyond {longest} tokens, so the context ends there")

    # ---- weights -------------------------------------------------------------------------------

    def read(self, name: str) -> fx.Node:
        """The node that reads the weight `name` of the raised graph."""
        if ("read", name) not in self._made:
            self._made["read", name] = self.out.weight(name)
        return self._made["read", name]

    def constant(self, name: str, data: Tensor) -> fx.Node:
        """A node that reads `data`, stored as a weight named after `name`; equal data is stored once."""
        key = ("constant", name, data.numpy().tobytes())
        if key not in self._made:
            unique = name
            while unique in self.out.weights:
                unique = f"{name}.{len(self._made)}"
            self.out.weights.add_tensor(unique, data)
            self._made[key] = self.read(unique)
        return self._made[key]

    def weight(self, weight: fx.Node) -> fx.Node:
        """The node that reads `weight`, which may be computed from other weights."""
        if weight.op == "get_attr":
            return self.read(str(weight.target))
        source = next(iter(_parameters(weight)), None)
        name = f"{source.target if source else 'computed:'}.{weight.name}"  # no module has a name with a colon
        if name not in self.out.weights:
            value = weight.meta["val"]
            dtype = torch.float32 if value.is_floating_point() else value.dtype
            self.out.weights.add(name, value.shape, dtype, lambda: self._evaluate(weight).to(dtype).contiguous())
        return self.read(name)

    def _derived(
        self, weight: fx.Node, label: str, shape: Sequence[int], change: Callable[[Tensor], Tensor]
    ) -> fx.Node:
        """The f32 weight `change(weight)` of shape `shape`, named by `label`."""
        name = f"{self.weight(weight).target}.{label}"
        if name not in self.out.weights:
            few_bits = weight.op == "get_attr" and self.out.weights.entries[str(weight.target)].few_bits
            self.out.weights.add(
                name, shape, torch.float32, lambda: change(self._evaluate(weight)).contiguous(), few_bits=few_bits
            )
        return self.read(name)

    def vector(self, weight: fx.Node) -> fx.Node:
        """`weight` as [F]; at most one of its dimensions may have more than 1 element."""
        value = weight.meta["val"]
        if value.dim() == 1 and value.is_floating_point():
            return self.weight(weight)
        return self._derived(weight, "flat", (value.numel(),), lambda w: w.flatten().float())  # also of whole numbers

    def spread(self, weight: fx.Node, size: int) -> fx.Node:
        """`weight` [H] (other dimensions have size 1) as [H * size], each element `size` times in a row."""
        count = weight.meta["val"].numel() * size
        return self._derived(weight, f"each{size}", (count,), lambda w: w.flatten().float().repeat_interleave(size))

    def rows_of(self, weight: fx.Node, rows: int) -> fx.Node:
        """The raised weight `weight` [F] as [rows, F / rows]."""
        source, store = str(weight.target), self.out.weights
        name = f"{source}.rows_of{rows}"
        if name not in store:
            size = (rows, store.entries[source].shape[0] // rows)
            store.add(name, size, store.entries[source].dtype, lambda: store[source].reshape(size))
        return self.read(name)

    def member(self, weight: fx.Node, number: int) -> fx.Node:
        """`weight` [H, .., N, K] as the matrix [N, K] of one head; dimensions between must have size 1."""
        size = tuple(weight.meta["val"].shape[-2:])
        return self._derived(weight, f"member{number}", size, lambda w: w[number].reshape(size))

    def head_matrix(self, weight: fx.Node, number: int) -> fx.Node:
        """`weight` [H, K, N] as the matrix [N, K] of one head."""
        _, k, n = weight.meta["val"].shape
        return self._derived(weight, f"matrix{number}", (n, k), lambda w: w[number].t())

    def head_vector(self, weight: fx.Node, number: int) -> fx.Node:
        """`weight` [H, 1, N] as the vector [N] of one head."""
        size = weight.meta["val"].shape[-1]
        return self._derived(weight, f"vector{number}", (size,), lambda w: w[number].reshape(size))

    def transposed(self, weight: fx.Node) -> fx.Node:
        """`weight` [K, N] as [N, K]; undoes a transpose instead of adding one."""
        dims = [d % 2 for d in weight.args[1:3]] if operator_name(weight) == "transpose" else []  # type: ignore[operator]
        if operator_name(weight) in ("t", "numpy_T") or dims in ([0, 1], [1, 0]) or _swaps_two(weight):
            return self.weight(weight.args[0])  # type: ignore[arg-type]
        shape = weight.meta["val"].shape
        return self._derived(weight, "T", (shape[1], shape[0]), lambda w: w.t())

    def transposed_experts(self, weight: fx.Node) -> fx.Node:
        """`weight` [E, K, N] as [E, N, K]."""
        experts, k, n = weight.meta["val"].shape
        return self._derived(weight, "T", (experts, n, k), lambda w: w.transpose(1, 2))

    def matrix(self, weight: fx.Node, rows: int, columns: int) -> fx.Node:
        """`weight` as a matrix of its dimensions `rows` and `columns`; all others must have size 1."""
        shape = weight.meta["val"].shape
        if len(shape) == 2 and rows == 0:
            return self.weight(weight)
        size = (int(shape[rows]), int(shape[columns]))
        return self._derived(weight, "rows", size, lambda w: w.movedim((rows, columns), (0, 1)).reshape(size))

    def permuted_matrix(self, weight: fx.Node, order: Sequence[int], rows: int) -> fx.Node:
        """`weight` with its dimensions permuted to `order`, as a matrix of `rows` rows."""
        shape = weight.meta["val"].shape
        if len(shape) == 2 and rows == shape[order[0]]:
            return self.weight(weight) if order[0] == 0 else self.transposed(weight)
        size, label = (rows, shape.numel() // rows), ".".join(map(str, order))
        return self._derived(weight, f"rows{rows}.{label}", size, lambda w: w.permute(*order).reshape(size))

    def chosen_rows(self, table: fx.Node, rows: torch.Tensor, node: fx.Node) -> fx.Node:
        """The weight `table` with the rows `rows` in their order; `table` itself if these are its first rows in order.

        Raises UnsupportedError naming `node` if a row is outside the table.
        """
        if not len(rows) or int(rows.min()) < 0 or int(rows.max()) >= table.meta["val"].shape[0]:
            raise unsupported(node, "chooses rows outside its table")
        if torch.equal(rows, torch.arange(len(rows))):
            return self.weight(table)
        return self._rows(self.weight(table), rows.numpy())

    def rows_from(self, weight: fx.Node, start: int) -> fx.Node:
        """The rows of `weight` from `start` on."""
        shape = weight.meta["val"].shape
        if start == 0:
            return self.weight(weight)
        return self._derived(weight, f"from{start}", (shape[0] - start, *shape[1:]), lambda w: w[start:])

    def concatenated(self, weights: Sequence[fx.Node]) -> fx.Node:
        """The raised weights [D] of several heads as one weight [H * D]."""
        names = [str(weight.target) for weight in weights]
        key, store = ("heads", *names), self.out.weights
        if key not in self._made:
            name, size = f"{names[0]}.heads{len(self._made)}", sum(store.entries[n].shape[0] for n in names)
            store.add(name, (size,), torch.float32, lambda: torch.cat([store[n].float() for n in names]))
            self._made[key] = self.read(name)
        return self._made[key]

    def product(self, first: fx.Node, second: fx.Node) -> fx.Node:
        """The product of two raised weights of one shape, element by element."""
        names, store = (str(first.target), str(second.target)), self.out.weights
        name = ".times.".join(names)
        if name not in store:
            store.add(
                name, second.meta["val"].shape, torch.float32, lambda: store[names[0]].float() * store[names[1]].float()
            )
        return self.read(name)

    def _rows(self, weight: Any, index: Index, axis: int = 0) -> fx.Node:
        """The rows `index` (along `axis`) of a raised weight, as a new weight."""
        key = ("rows", weight, index.tobytes())
        if key not in self._made:
            source = str(weight.target)
            name = f"{source}.rows{sum(k[0] == 'rows' for k in self._made)}"
            rows, shape = torch.from_numpy(index.copy()), list(weight.meta["val"].shape)
            shape[axis] = len(index)
            store = self.out.weights
            store.add(name, shape, weight.meta["val"].dtype, lambda: store[source].index_select(axis, rows))
            self._made[key] = self.read(name)
        return self._made[key]

    # ---- features ------------------------------------------------------------------------------

    def emit(self, value: Value, sizes: Sequence[int], node: Any) -> fx.Node:
        """The raised tensor [B, T, *sizes] that holds the features of `value` in their order.

        Raises UnsupportedError naming `node` if there is no such tensor.
        """
        coefs = np.unique(value.terms["coef"])
        if not value.is_plain() or len(coefs) != 1 or len(sizes) > 2:
            raise unsupported(node, "combines features in a way that no operator of qcompile does")
        assert value.base is not None
        if not value.base.meta["val"].is_floating_point():
            raise unsupported(node, "computes with indices, which may only choose experts")
        index = value.terms["index"].ravel()
        made = self.select_features(value.base, index, node)
        made = self.shaped(made, tuple(sizes))
        return made if coefs[0] == 1 else self.call("scale", made, float(coefs[0]))

    def apply(self, name: str, value: Value, node: Any, *more: Any) -> Value:
        """qcompile::name applied to each feature of `value`, with further arguments `more`.

        Raises UnsupportedError naming `node` if no raised tensor holds the features of `value`.
        """
        return identity(self.call(name, self.emit(value, working_sizes(value), node), *more), value.dims, value.sizes)

    def select_features(self, base: fx.Node, index: Index, node: Any) -> fx.Node:
        """The features `index` of `base`, flattened unless they are all of them in order.

        Reads fewer rows of a linear's weight where it can, else gathers. Raises UnsupportedError naming `node` if the
        features differ between the experts of a token.
        """
        count = math.prod(feature_sizes(base))
        start, kind = int(index[0]), ops.name_of(base.target)
        if kind != "gather_features" and np.array_equal(index, np.arange(start, start + len(index))):
            if len(index) == count:
                return base
            if kind != "expert_linear" or not is_one_slot(base):
                return self.call("slice_features", self.flat(base), start, start + len(index))
        if kind == "expert_linear":
            return self._expert_rows(base, index, node)
        flat = self.flat(base)
        if not _has_stored_weight(flat):
            return self._gathered(flat, index, node)
        return self.call("linear", flat.args[0], *(self._rows(w, index) for w in flat.args[1:] if w is not None))

    def _expert_rows(self, base: fx.Node, index: Index, node: Any) -> fx.Node:
        """The features `index` of every slot of an expert linear, selected as rows of its weights."""
        slots, width = feature_sizes(base)
        wanted = index.reshape(slots, -1) - np.arange(slots)[:, None] * width
        x, chosen, weight, *bias = base.args
        if (wanted != wanted[0]).any() or weight.op != "get_attr":  # type: ignore[union-attr]
            raise unsupported(node, "takes different features from different experts of a token")
        return self.call("expert_linear", x, chosen, *(self._rows(w, wanted[0], 1) for w in (weight, *bias)))

    def _gathered(self, base: fx.Node, index: Index, node: Any) -> fx.Node:
        """The features `index` of `base` [B, T, F] as a gather that reads no more of each source than it needs."""

        def cut(source: fx.Node, used: Index) -> tuple[fx.Node, Index]:
            in_order = np.array_equal(used, np.arange(used[0], used[0] + len(used)))
            if in_order or _has_stored_weight(source):
                return self.select_features(source, used, node), np.arange(len(used))
            least = int(used.min())
            return self.select_features(source, np.arange(least, used.max() + 1), node), used - least

        sources, index = gather.flattened([base], index, gather.table_of(self.out))
        sources, index = gather.trimmed(sources, index, cut)
        whole = len(sources) == 1 and np.array_equal(index, np.arange(feature_sizes(sources[0])[0]))
        return sources[0] if whole else self.gather(sources, index)

    def gather(self, sources: Sequence[fx.Node], index: Index) -> fx.Node:
        """qcompile::gather_features: [B, T, len(index)] from the concatenated features of `sources` [B, T, F]."""
        return self.call("gather_features", list(sources), self.constant("gather", torch.from_numpy(index)))

    def flat(self, node: fx.Node) -> fx.Node:
        """`node` [B, T, ...] as [B, T, F]."""
        return self.shaped(node, (math.prod(feature_sizes(node)),))

    def shaped(self, node: fx.Node, sizes: tuple[int, ...]) -> fx.Node:
        """`node` with its features split into heads, or merged, to match `sizes`."""
        if feature_sizes(node) == sizes:
            return node
        if len(feature_sizes(node)) == 2:
            split = ops.name_of(node.target) == "split_heads"
            node = node.args[0] if split else self.call(*merging(node))  # type: ignore[assignment]
        return node if len(sizes) == 1 else self.call("split_heads", node, sizes[0])


def feature_sizes(node: fx.Node) -> tuple[int, ...]:
    """Sizes of a raised tensor after batch and tokens."""
    return tuple(node.meta["val"].shape[2:])


def working_sizes(value: Value) -> tuple[int, ...]:
    """The shape in which to apply an elementwise operator: the value's own if it has one or two feature axes.

    A single slot, which the value does not show, is kept.
    """
    if is_one_slot(value.base):
        return (1, value.count)
    return value.sizes if 1 <= len(value.sizes) <= 2 else (value.count,)


def _has_stored_weight(node: fx.Node) -> bool:
    """Whether `node` is a linear that reads its weight from the store, where rows can be selected."""
    return ops.name_of(node.target) == "linear" and node.args[1].op == "get_attr"  # type: ignore[union-attr]


def _swaps_two(node: fx.Node) -> bool:
    """Whether `node` permutes a matrix into its transpose."""
    return operator_name(node) == "permute" and list(node.args[1]) in ([1, 0], [-1, -2])  # type: ignore[arg-type]


def _parameters(node: fx.Node) -> list[fx.Node]:
    """The weights from which `node` is computed, in order."""
    if node.op == "get_attr":
        return [node]
    return [source for n in node.all_input_nodes for source in _parameters(n)]
