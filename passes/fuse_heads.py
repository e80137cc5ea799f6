"""Fuse what happens to heads: norms, rotary embedding and cache append around attention, as operators on flat values.

Kernels work on rows [M, F]. A value [M, H, D] is columns of such a row, so each operator on heads becomes one that
changes columns in place (norm_heads, rope_heads), appends them (rope_append), or an elementwise one on all columns.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from torch import fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.passes.gather import gathered

NORM_KINDS = {"rms_norm": "rms", "layer_norm": "layer"}
"""The kind operand of fused norms by the operator of the norm."""


@dataclass(frozen=True)
class _Norm:
    """A norm over `blocks` blocks of `width` columns; `operands` are those of norm_heads that say which norm."""

    operands: dict[str, Any]
    blocks: int
    width: int


@dataclass(frozen=True)
class _Heads:
    """A value [M, H, D] read from `source` [M, F] starting at column `start`, optionally normalized and rotated.

    `rope` are the operands of the rope other than its value, by name; None without rope. `center` and `block` are those
    of rotate_heads. The heads are multiplied by `table` [P, 1] at their position, and by `weight` [D] after RoPE.
    `alone` says that nothing else reads these columns, so that they may be overwritten.
    """

    source: fx.Node
    start: int
    heads: int
    head_dim: int
    rope: dict[str, Any] | None = None
    norm: _Norm | None = None
    center: fx.Node | None = None
    block: int = 0
    table: fx.Node | None = None
    weight: fx.Node | None = None
    alone: bool = False

    @property
    def is_changed(self) -> bool:
        """Whether anything but a norm changes the heads."""
        changes = (self.rope, self.center, self.table, self.weight)
        return self.block > 0 or any(change is not None for change in changes)

    @property
    def stop(self) -> int:
        """The column of `source` after the heads."""
        return self.start + self.heads * self.head_dim


class _Chain:
    """A walk from a value back through its producers: `nodes` are the nodes passed, `end` is the value reached."""

    def __init__(self, graph: Graph, end: fx.Node) -> None:
        self.graph, self.end = graph, end
        self.nodes: list[fx.Node] = []

    def take(self, *kinds: str) -> dict[str, Any] | None:
        """Step to the first operand of `end` if `end` is one of the operators `kinds`; returns its other operands."""
        if ops.name_of(self.end.target) not in kinds:
            return None
        self.nodes.append(self.end)
        (_, first), *others = ops.named(self.end).items()
        self.end = first
        return dict(others)

    def take_norm(self, blocks: int, width: int) -> _Norm | None:
        """Step over `end` if it is a norm over `blocks` blocks of `width` columns."""
        norm = self.end
        return None if self.take(*NORM_KINDS) is None else _Norm(norm_operands(norm), blocks, width)

    def take_rope(self, positions: fx.Node) -> dict[str, Any] | None:
        """Step over a rope by the rows' own `positions`; returns its other operands."""
        if ops.name_of(self.end.target) != "rope" or ops.operand(self.end, "positions") is not positions:
            return None
        return self.take("rope")

    def take_weight(self) -> fx.Node | None:
        """Step over a multiplication of the heads `end` by a weight [D]; returns the weight."""
        factor = self._factor()
        if factor is None or not self.graph.is_weight(factor) or factor.meta["val"].dim() != 1:
            return None
        self.take("mul")
        return factor

    def take_table(self, positions: fx.Node) -> fx.Node | None:
        """Step over a multiplication of `end` by a row of a table [P, 1] indexed by position; returns the table."""
        row = self._factor()
        if row is None or ops.name_of(row.target) != "embedding" or ops.operand(row, "ids") is not positions:
            return None
        table: fx.Node = ops.operand(row, "weight")
        if table.meta["val"].shape[1] != 1:
            return None
        self.take("mul")
        return table

    def _factor(self) -> fx.Node | None:
        """The second operand of `end` if it is a product."""
        factor: fx.Node | None = ops.operand(self.end, "b") if ops.name_of(self.end.target) == "mul" else None
        return factor


def _heads_of(graph: Graph, node: fx.Node, positions: fx.Node, queries: bool = False) -> _Heads:
    """Match [rotate_heads] [rope] [norm] split_heads [norm] [slice] backwards from `node`, as much as there is.

    With `queries`, the heads may also be multiplied by a table before the operand of split_heads, or by a weight after
    rope. A value that is not split from columns is taken as it is, its heads side by side.
    """
    heads, head_dim = node.meta["val"].shape[-2:]
    chain = _Chain(graph, node)
    rotation = chain.take("rotate_heads") or {"center": None, "block": 0}
    weight = chain.take_weight() if queries else None
    rope = chain.take_rope(positions)
    norm = chain.take_norm(heads, head_dim)
    table, start = None, 0
    if chain.take("split_heads") is None:
        chain.end = _merged(graph, chain.end)
    else:
        table = chain.take_table(positions) if queries and norm is None else None
        if table is not None and _is_normed_in_heads(chain.end, (heads, head_dim)):
            chain.take("merge_heads")
            norm = chain.take_norm(heads, head_dim)
            chain.take("split_heads")
        norm = norm or chain.take_norm(1, heads * head_dim)
        cut = chain.take("slice_features")
        start = 0 if cut is None else cut["start"]
    part = _Heads(chain.end, start, heads, head_dim, rope, norm, **rotation, table=table, weight=weight)
    alone = all(len(n.users) == 1 for n in chain.nodes) and _reads_alone(part, chain.nodes)
    return replace(part, alone=alone)


def _merged(graph: Graph, heads: fx.Node) -> fx.Node:
    """`heads` [M, H, D] as [M, H * D], right behind it."""
    with graph.fx.inserting_after(heads):
        return graph.call("merge_heads", heads)


def _reads_alone(part: _Heads, chain: Sequence[fx.Node]) -> bool:
    """Whether what reads the source beside `chain` reads other columns than those of `part`."""
    if ops.name_of(part.source.target) == "merge_heads":
        return False  # others may read the heads
    others = [user for user in part.source.users if user not in chain]
    slices = [ops.operands(user) for user in others if ops.name_of(user.target) == "slice_features"]
    return len(slices) == len(others) and all(s.stop <= part.start or s.start >= part.stop for s in slices)


def _is_normed_in_heads(node: fx.Node, shape: tuple[int, int]) -> bool:
    """Whether `node` is merge_heads(norm(split_heads(...))) with heads of `shape` (H, D)."""
    for kinds in (("merge_heads",), NORM_KINDS):
        if ops.name_of(node.target) not in kinds:
            return False
        node = ops.operand(node, "x")
    return ops.name_of(node.target) == "split_heads" and tuple(node.meta["val"].shape[-2:]) == shape


def norm_operands(norm: fx.Node) -> dict[str, Any]:
    """weight, bias, eps and kind of an rms_norm or layer_norm, as norm_quantize and norm_heads have them."""
    given = ops.named(norm)
    kind = NORM_KINDS[ops.name_of(norm.target) or ""]
    return {"weight": given["weight"], "bias": given.get("bias"), "eps": given["eps"], "kind": kind}


# ---- attention ---------------------------------------------------------------------------------------


def fuse(graph: Graph, node: fx.Node) -> bool:
    """q, k, v of one value; q, k normalized and rotated; k, v appended; attention -> rope_append, kv_attention.

    Factors of q after its norm become operands of rope_append. Norms become in-place norm_heads before it. Heads that
    rope_append cannot make so are made by their own operators first. If another attention has appended the keys and
    values, only the queries are left to fuse.
    """
    append: fx.Node = ops.operand(node, "cache")
    own = ops.name_of(append.target) == "kv_append" and ops.operand(append, "layer") == ops.operand(node, "layer")
    if not own:
        return _fuse_queries(graph, node)
    given = ops.named(append)
    parts = _appended_parts(graph, node, append)
    q, k = parts[:2]
    rope = {"inv_freq": None, "scaling": 1.0, "interleaved": False} | (q.rope or {})
    with graph.fx.inserting_before(node):
        source = _normalized(graph, q.source, parts)
        joined = graph.call(
            "rope_append",
            source,
            **(rope | {name: value for name, value in given.items() if name not in ("k", "v")}),
            offsets=[part.start for part in parts],
            heads=q.heads,
            kv_heads=k.heads,
            head_dim=q.head_dim,
            center=k.center,
            block=k.block,
            query_table=q.table,
            query_weight=q.weight,
        )
        rotated, new_cache = (graph.fx.call_function(operator.getitem, (joined, i)) for i in (0, 1))
        graph.infer_node(rotated)
        graph.infer_node(new_cache)
        ops.set_operands(node, q=_cut(graph, rotated, q))
    append.replace_all_uses_with(new_cache)
    graph.fx.erase_node(append)
    return True


def _appended_parts(graph: Graph, node: fx.Node, append: fx.Node) -> Sequence[_Heads]:
    """q, k and v (if it is appended) of an attention and its append, in columns of one source of their own."""
    given = ops.operands(append)
    query = ops.operand(node, "q")
    q, k = (_heads_of(graph, n, given.positions, n is query) for n in (query, given.k))
    if q.rope != k.rope or q.center is not None or q.block != k.block:
        q, k = (_as_they_are(graph, n) for n in (query, given.k))
    parts = [q, k]
    if given.v is not None:
        v = _heads_of(graph, given.v, given.positions)
        parts.append(_as_they_are(graph, given.v) if v.is_changed else v)
    changed = [q, k, *(v for v in parts[2:] if v.norm is not None)]
    if all(part.source is q.source for part in parts) and all(part.alone for part in changed):
        return parts
    return _side_by_side(graph, node, parts)


def _as_they_are(graph: Graph, heads: fx.Node) -> _Heads:
    """`heads` [M, H, D] as their own operators make them."""
    return _Heads(_merged(graph, heads), 0, *heads.meta["val"].shape[-2:])


def _fuse_queries(graph: Graph, node: fx.Node) -> bool:
    """Normalize and rotate the queries of an attention that appends nothing."""
    query = ops.operand(node, "q")
    made = _flat(graph, query, queries=True)
    if made is None:
        return False
    ops.set_operands(node, q=made)
    return True


def _normalized(graph: Graph, source: fx.Node, parts: Sequence[_Heads]) -> fx.Node:
    """`source` with the columns of each part that has a norm normalized, at the insertion point."""
    for part in parts:
        if part.norm is not None:
            where = {"offset": part.start, "heads": part.norm.blocks, "width": part.norm.width}
            source = graph.call("norm_heads", source, **part.norm.operands, **where)
    return source


def _cut(graph: Graph, source: fx.Node, part: _Heads) -> fx.Node:
    """The heads [M, H, D] of `part` in `source` [M, F], at the insertion point."""
    picked = source
    if (part.start, part.stop) != (0, source.meta["val"].shape[-1]):
        picked = graph.call("slice_features", source, part.start, part.stop)
    return graph.call("split_heads", picked, part.heads)


def _side_by_side(graph: Graph, node: fx.Node, parts: Sequence[_Heads]) -> list[_Heads]:
    """The same heads, read from one new value before `node` that holds their columns and has no other users."""
    sources = list(dict.fromkeys(part.source for part in parts))
    widths = [source.meta["val"].shape[-1] for source in sources]
    starts = dict(zip(sources, accumulate([0, *widths]), strict=False))
    columns = [np.arange(part.heads * part.head_dim) + starts[part.source] + part.start for part in parts]
    with graph.fx.inserting_before(node):
        made = gathered(graph, sources, np.concatenate(columns))
    ends = accumulate([0, *(len(each) for each in columns)])
    return [replace(part, source=made, start=start, alone=True) for part, start in zip(parts, ends, strict=False)]


# ---- heads that no attention fuses ---------------------------------------------------------------------


def flatten(graph: Graph) -> None:
    """Make the remaining operators on heads work on columns of flat values, the last of a chain first."""
    graph.erase_dead()
    for node in reversed(graph.calls("rotate_heads", "rope", *NORM_KINDS)):
        if node.users and node.meta["val"].dim() == 3 and (made := _flat(graph, node)) is not None:
            graph.replace(node, made)
            graph.erase_dead()
    for node in graph.calls("mul", "add"):
        _flatten_binary(graph, node)


def _flat(graph: Graph, node: fx.Node, queries: bool = False) -> fx.Node | None:
    """The heads `node` [M, H, D], normalized and rotated in columns of a flat value; None if they are neither."""
    part = _heads_of(graph, node, graph.inputs[1], queries)
    if not part.is_changed and part.norm is None:
        return None
    if not part.alone:
        (part,) = _side_by_side(graph, node, (part,))
    rope = {"inv_freq": None, "positions": graph.inputs[1], "scaling": 1.0, "interleaved": False} | (part.rope or {})
    with graph.fx.inserting_before(node):
        source = _normalized(graph, part.source, (part,))
        if part.is_changed:
            where = {"offset": part.start, "heads": part.heads, "head_dim": part.head_dim}
            factors = {"center": part.center, "block": part.block, "table": part.table, "weight": part.weight}
            source = graph.call("rope_heads", source, **rope, **where, **factors)
        return _cut(graph, source, part)


def _flatten_binary(graph: Graph, node: fx.Node) -> None:
    """A sum or product of heads [M, H, D] and a weight, or a value with fewer features, on flat values [M, H * D]."""
    a, b = ops.operand(node, "a"), ops.operand(node, "b")
    if graph.is_weight(a) or a.meta["val"].dim() < b.meta["val"].dim():
        a, b = b, a
    shape = tuple(node.meta["val"].shape)
    if len(shape) != 3 or tuple(a.meta["val"].shape) != shape or tuple(b.meta["val"].shape) == shape:
        return
    with graph.fx.inserting_before(node):
        other = _spread(graph, b, shape[1], shape[2])
        if other is None:
            return
        flat = graph.call(str(ops.name_of(node.target)), graph.call("merge_heads", a), other)
        made = graph.call("split_heads", flat, shape[1])
    graph.replace(node, made)


def _spread(graph: Graph, factor: fx.Node, heads: int, size: int) -> fx.Node | None:
    """A weight [D] or a value [M, H, 1] or [M, 1] as an operand of values [M, H * D]; None for other shapes."""
    shape = tuple(factor.meta["val"].shape)
    if graph.is_weight(factor):
        return graph.call_weight("repeat_heads", factor, heads, size) if shape == (size,) else None
    if shape[1:] == (heads, 1):
        return gathered(graph, [graph.call("merge_heads", factor)], np.repeat(np.arange(heads), size))
    return None
