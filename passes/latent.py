"""Latent: cache what the keys and values of all heads are computed from, instead of the keys and values.

Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1) computes the keys of head h as [r; A_h c]
and its values as B_h c, from a latent c and a rotated key r that all heads share. The score of a query [s; t] is
s . r + (A_h^T t) . c, and the sum of values weighted by softmax is B_h times the sum of latents. So attention over one
key head [r; c] with the values c does the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import fx

from qcompile import ops
from qcompile.errors import PassError, UsageError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.decisions import keep_precision
from qcompile.passes.gather import Index, gathered, index_weight, table_of

LEAST_GAIN = 4
"""Fewest cached numbers that one of [r; c] must replace. It is below the gain of published models (from 17 on), and
above the factor by which scores and sums over latents take more arithmetic than over keys and values (3.4 for
512 features instead of 128)."""


@dataclass(frozen=True)
class _Limits:
    """Shapes for which a kind of target has kernels: most shared features, most features of a latent, and a number of
    which the features of latents, values and what is multiplied into queries are multiples."""

    shared: int
    rank: int
    multiple: int


LIMITS = {"cpu": _Limits(512, 512, 1), "cuda": _Limits(128, 512, 32)}


@dataclass(frozen=True)
class Latent(Pass):
    """Rewrites attention over keys and values that are linear in one latent to attention over a single key head.

    The key head holds the features that all heads share, and then the latent, which is also the value. The matrices of
    the linears from the latent to keys and values are applied to queries and to attention's results instead, head by
    head (expert_linear with every_expert). Fires where that is proved of all attentions, with latents of one shape, and
    makes the cache smaller by LEAST_GAIN. The notes list an attention if its values come from a latent but its keys do
    not, and if targets of `kind` have no kernels for its shape. `fired` counts attentions.
    """

    name: ClassVar[str] = "latent"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = True
    kind: str = "cpu"

    def __post_init__(self) -> None:
        if self.kind not in LIMITS:
            raise UsageError(f"latent.kind={self.kind} is unknown; there are {', '.join(LIMITS)}")

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        notes = []
        rewrites: list[_Rewrite] = []
        for node in graph.calls("attention"):
            values = _values_of_latent(graph, node)
            if values is None:
                continue
            try:
                keys = _keys_of_latent(graph, node, values.latent)
                if _pays(node, values.latent, int(keys.shared.sum())):
                    self._check_shape(node, values, keys)
                    rewrites.append(_Rewrite(graph, node, values, keys).check())
            except PassError as error:
                notes.append(str(error))
        kinds = {rewrite.layout for rewrite in rewrites}
        if len(kinds) > 1 or 0 < len(rewrites) < len(graph.calls("attention")):  # a cache has one layout
            notes.append(str(_refused(rewrites[0].node, "other layers have no latent, or one of another shape")))
            rewrites = []
        choices: dict[int, fx.Node] = {}
        for rewrite in rewrites:
            rewrite.apply(choices)
        graph.erase_dead()
        return PassResult(graph, len(rewrites), tuple(notes))

    def _check_shape(self, node: fx.Node, values: _Projection, keys: _Keys) -> None:
        """Raise PassError if there are no kernels for the shape of an attention."""
        limits, rank = LIMITS[self.kind], values.latent.meta["val"].shape[-1]
        shared, *parts = int(keys.shared.sum()), rank, values.rows.shape[1], keys.projection.rows.shape[1]
        if shared > limits.shared or rank > limits.rank or any(part % limits.multiple for part in parts):
            given = (
                f"{shared} shared features, a latent of {rank}, values of {parts[1]} and other features of {parts[2]}"
            )
            raise _refused(node, f"there are no {self.kind} kernels for {given}")


def _refused(node: fx.Node, reason: str) -> PassError:
    return PassError(Latent.name, node.name, reason)


# ---- where features of heads come from -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Origins:
    """Heads [..., H, D] by feature: `sources` are values [..., F], and feature d of head h is column `column[h, d]` of
    source `source[h, d]`; both are -1 for a zero."""

    sources: list[fx.Node]
    source: Index
    column: Index

    @property
    def shared(self) -> Any:
        """bool [D]: which features are the same for all heads."""
        same = (self.source == self.source[:1]) & (self.column == self.column[:1])
        return same.all(0)


def _origins(graph: Graph, split: fx.Node) -> _Origins | None:
    """Where the features of `split` come from, if it is split_heads of a gather or of another value."""
    if ops.name_of(split.target) != "split_heads":
        return None
    flat, shape = ops.operand(split, "x"), split.meta["val"].shape[-2:]
    if ops.name_of(flat.target) == "gather_features":
        sources, index = list(ops.operand(flat, "sources")), table_of(graph)(flat)
    else:
        sources, index = [flat], np.arange(shape[0] * shape[1])
    starts = np.cumsum([0, *(source.meta["val"].shape[-1] for source in sources)])
    source = np.where(index < 0, -1, np.searchsorted(starts, index, side="right") - 1)
    column = np.where(index < 0, -1, index - starts[source])
    return _Origins(sources, source.reshape(shape), column.reshape(shape))


def _is_plain_linear(graph: Graph, node: fx.Node) -> bool:
    """Whether `node` is x W^T: a linear over a weight, without a bias."""
    linear = ops.name_of(node.target) == "linear" and graph.is_weight(ops.operand(node, "weight"))
    return linear and ops.operand(node, "bias") is None


@dataclass(frozen=True)
class _Projection:
    """Features of heads that are rows `rows` [H, N] of `linear`, which reads the latent."""

    linear: fx.Node
    rows: Index

    @property
    def latent(self) -> fx.Node:
        """The value that the linear reads."""
        latent: fx.Node = ops.operand(self.linear, "x")
        return latent


def _values_of_latent(graph: Graph, node: fx.Node) -> _Projection | None:
    """The values of attention `node` as rows of a linear over a value narrow enough to be cached instead; else None."""
    values = _origins(graph, ops.operand(node, "v"))
    if values is None or values.source[0, 0] < 0 or (values.source != values.source[0, 0]).any():
        return None
    linear = values.sources[values.source[0, 0]]
    if ops.name_of(linear.target) != "linear" or not graph.is_weight(ops.operand(linear, "weight")):
        return None
    return _Projection(linear, values.column) if _pays(node, ops.operand(linear, "x")) else None


def _pays(node: fx.Node, latent: fx.Node, shared: int = 0) -> bool:
    """Whether `shared` features and the latent are few enough beside the keys and values of attention `node`."""
    key, value = (ops.operand(node, name).meta["val"].shape for name in ("k", "v"))
    return LEAST_GAIN * (shared + latent.meta["val"].shape[-1]) <= key[-2] * (key[-1] + value[-1])


@dataclass(frozen=True)
class _Keys:
    """Keys [r; A_h c] of an attention: features `shared` [D] are r, the others rows of a linear over the latent."""

    rope: fx.Node | None
    origins: _Origins
    shared: Any
    projection: _Projection


def _keys_of_latent(graph: Graph, node: fx.Node, latent: fx.Node) -> _Keys:
    """The keys of attention `node`. Raises PassError if they are not linear in `latent` but for shared features."""
    key = ops.operand(node, "k")
    rope = key if ops.name_of(key.target) == "rope" else None
    split = ops.operand(key, "x") if rope else key
    origins = _origins(graph, split)
    if origins is None:
        raise _refused(node, f"its values come from a latent, but its keys are made by {split.name}")
    shared = origins.shared
    if rope and not shared[: 2 * ops.operand(rope, "inv_freq").meta["val"].shape[0]].all():
        raise _refused(node, "its values come from a latent, but every head has rotated keys of its own")
    own = origins.source[:, ~shared]
    if own.size == 0 or (own != own.flat[0]).any() or own.flat[0] < 0:
        raise _refused(node, "its values come from a latent, but its keys come from several values")
    linear = origins.sources[own.flat[0]]
    if not _is_plain_linear(graph, linear) or ops.operand(linear, "x") is not latent:
        raise _refused(node, f"its keys are not a product of the latent {latent.name} with a weight, but {linear.name}")
    return _Keys(rope, origins, shared, _Projection(linear, origins.column[:, ~shared]))


# ---- the rewrite -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rewrite:
    """The attention `node` with proven `values` and `keys`."""

    graph: Graph
    node: fx.Node
    values: _Projection
    keys: _Keys

    @property
    def layout(self) -> tuple[int, int]:
        """Numbers of features that all heads share, and of the latent."""
        return int(self.keys.shared.sum()), int(self.values.latent.meta["val"].shape[-1])

    def check(self) -> _Rewrite:
        """This rewrite. Raises PassError if it is not possible."""
        self._queries()
        if not _is_plain_linear(self.graph, self.values.linear):
            linear = self.values.linear.name
            raise _refused(self.node, f"its values are a latent's product with a weight, but with a bias: {linear}")
        if ops.operand(self.node, "center") is not None:
            raise _refused(self.node, "a mean was subtracted from its keys")
        return self

    def apply(self, choices: dict[int, fx.Node]) -> None:
        """Rewrite; `choices` are the nodes that choose every head, by number of heads."""
        graph, node = self.graph, self.node
        queries = self._queries()
        heads = node.meta["val"].shape[-2]
        if heads not in choices:
            with graph.fx.inserting_after(graph.inputs[-1]):
                choices[heads] = graph.call("every_expert", graph.inputs[0], heads)
        with graph.fx.inserting_before(node):
            query = self._query(queries, choices[heads])
            key = self._key()
            first, stop = int(self.keys.shared.sum()), key.meta["val"].shape[-1]
            value = graph.call("slice_features", graph.call("merge_heads", key), first, stop)
            given = ops.named(node) | {"q": query, "k": key, "v": graph.call("split_heads", value, 1)}
            attended = graph.call("attention", **given)
            weight = self._weight(self.values, transposed=False)
            result = graph.call("expert_linear", attended, choices[heads], weight)
        keep_precision(self.values.linear, result)
        graph.replace(node, result)

    def _queries(self) -> fx.Node:
        """The queries [..., H * D] before rotation."""
        query, rope = ops.operand(self.node, "q"), self.keys.rope
        if rope is not None:
            if ops.name_of(query.target) != "rope" or _rope_operands(query) != _rope_operands(rope):
                raise _refused(self.node, "its queries are not rotated like its keys")
            query = ops.operand(query, "x")
        if ops.name_of(query.target) != "split_heads":
            raise _refused(self.node, f"its queries are not slices of one value, but made by {query.name}")
        flat: fx.Node = ops.operand(query, "x")
        return flat

    def _query(self, flat: fx.Node, choice: fx.Node) -> fx.Node:
        """The queries [s; A_h^T t] of the new attention, from those [..., H * D] of the old one."""
        graph, shared = self.graph, self.keys.shared
        heads, width = choice.meta["val"].shape[-1], flat.meta["val"].shape[-1]
        place = np.arange(width).reshape(heads, -1)
        own = graph.call("split_heads", gathered(graph, [flat], place[:, ~shared].ravel()), heads)
        absorbed = graph.call("expert_linear", own, choice, self._weight(self.keys.projection, transposed=True))
        keep_precision(self.keys.projection.linear, absorbed)
        rank = absorbed.meta["val"].shape[-1]
        latent = width + np.arange(heads * rank).reshape(heads, rank)
        index = np.concatenate([place[:, shared], latent], 1).ravel()
        joined = gathered(graph, [flat, graph.call("merge_heads", absorbed)], index)
        return self._rotated(graph.call("split_heads", joined, heads))

    def _key(self) -> fx.Node:
        """The key [r; c] of the new attention."""
        graph, keys, shared, latent = self.graph, self.keys.origins, self.keys.shared, self.values.latent
        starts = np.cumsum([0, *(source.meta["val"].shape[-1] for source in keys.sources)])
        source, column = keys.source[0, shared], keys.column[0, shared]
        common = np.where(source < 0, -1, starts[source] + column)
        index = np.concatenate([common, starts[-1] + np.arange(latent.meta["val"].shape[-1])])
        return self._rotated(graph.call("split_heads", gathered(graph, [*keys.sources, latent], index), 1))

    def _rotated(self, heads: fx.Node) -> fx.Node:
        """`heads` rotated like the keys: the rotated features are the first of those that heads share."""
        return heads if self.keys.rope is None else self.graph.call("rope", heads, **_rope_operands(self.keys.rope))

    def _weight(self, projection: _Projection, transposed: bool) -> fx.Node:
        """The matrix of a projection for each query head, [H, rows, latent], or [H, latent, rows] if `transposed`."""
        heads, kv_heads = self.node.meta["val"].shape[-2], len(projection.rows)
        rows = projection.rows.repeat(heads // kv_heads, 0).ravel()
        weight = ops.operand(projection.linear, "weight")
        index = index_weight(self.graph, rows)
        return self.graph.call_weight("head_rows", weight, index, heads, transposed)


def _rope_operands(rope: fx.Node) -> dict[str, Any]:
    """The operands of a rope but its value."""
    return {name: operand for name, operand in ops.named(rope).items() if name != "x"}
