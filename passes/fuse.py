"""Fuse: join neighbouring operators that one kernel does in one pass over memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
from torch import fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.gather import gathered

_NORMS = {"rms_norm": "rms", "layer_norm": "layer"}


@dataclass(frozen=True)
class Fuse(Pass):
    """Norm + quantization; online rotation + quantization; norms in heads + rope + cache append; gemm + residual add.

    All but the append require that the inner value has one user; the append copies heads that others read too. Gate
    activations are fused earlier, by `merge`, because their weights must be joined before rounding.
    """

    name: ClassVar[str] = "fuse"
    requires: ClassVar[tuple[str, ...]] = ("cache",)

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        fired = sum(_fuse_norm(graph, node) for node in graph.calls("quantize_activation"))
        fired += sum(_fuse_rotation(graph, node) for node in graph.calls("quantize_activation"))
        fired += sum(_fuse_append(graph, node) for node in graph.calls("kv_attention"))
        fired += sum(_fuse_add(graph, node) for node in graph.calls("add"))
        graph.erase_dead()
        return PassResult(graph, fired)


def _fuse_norm(graph: Graph, node: fx.Node) -> bool:
    """quantize_activation(norm(x)) -> norm_quantize(x), when the norm has no other user."""
    norm: fx.Node = ops.operand(node, "x")
    dtype, group = ops.operand(node, "kind"), ops.operand(node, "group")
    kind = _NORMS.get(ops.name_of(norm.target) or "")
    if kind is None or len(norm.users) > 1 or dtype == "f32":
        return False
    with graph.fx.inserting_before(node):
        fused = graph.call("norm_quantize", ops.operand(norm, "x"), **_norm_operands(norm), dtype=dtype, group=group)
    graph.replace(node, fused)
    graph.fx.erase_node(norm)
    return True


def _fuse_rotation(graph: Graph, node: fx.Node) -> bool:
    """quantize_activation(hadamard(x)) -> hadamard_quantize(x), when the rotated value has no other user."""
    rotated: fx.Node = ops.operand(node, "x")
    dtype, group = ops.operand(node, "kind"), ops.operand(node, "group")
    if ops.name_of(rotated.target) != "hadamard" or len(rotated.users) > 1 or dtype == "f32":
        return False
    with graph.fx.inserting_before(node):
        fused = graph.call("hadamard_quantize", **ops.named(rotated), dtype=dtype, group=group)
    graph.replace(node, fused)
    graph.fx.erase_node(rotated)
    return True


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
    `alone` says that the values in between have no other users, so that the source's columns may be overwritten.
    """

    source: fx.Node
    start: int
    heads: int
    head_dim: int
    rope: dict[str, Any] | None
    norm: _Norm | None
    center: fx.Node | None
    block: int
    table: fx.Node | None
    weight: fx.Node | None
    alone: bool


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
        return None if self.take(*_NORMS) is None else _Norm(_norm_operands(norm), blocks, width)

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


def _heads_of(graph: Graph, node: fx.Node, positions: fx.Node, queries: bool = False) -> _Heads | None:
    """Match [rotate_heads] [rope] [norm] split_heads [norm] [slice] backwards from `node`; None without a match.

    With `queries`, the heads may also be multiplied by a table before the operand of split_heads, or by a weight after
    rope.
    """
    heads, head_dim = node.meta["val"].shape[-2:]
    chain = _Chain(graph, node)
    rotation = chain.take("rotate_heads") or {"center": None, "block": 0}
    weight = chain.take_weight() if queries else None
    rope = chain.take("rope")
    norm = chain.take_norm(heads, head_dim)
    if chain.take("split_heads") is None:
        return None
    table = chain.take_table(positions) if queries and norm is None else None
    if table is not None and _is_normed_in_heads(chain.end, (heads, head_dim)):
        chain.take("merge_heads")
        norm = chain.take_norm(heads, head_dim)
        chain.take("split_heads")
    norm = norm or chain.take_norm(1, heads * head_dim)
    cut = chain.take("slice_features")
    alone = all(len(n.users) == 1 for n in chain.nodes)
    start = 0 if cut is None else cut["start"]
    return _Heads(chain.end, start, heads, head_dim, rope, norm, **rotation, table=table, weight=weight, alone=alone)


def _is_normed_in_heads(node: fx.Node, shape: tuple[int, int]) -> bool:
    """Whether `node` is merge_heads(norm(split_heads(...))) with heads of `shape` (H, D)."""
    for kinds in (("merge_heads",), _NORMS):
        if ops.name_of(node.target) not in kinds:
            return False
        node = ops.operand(node, "x")
    return ops.name_of(node.target) == "split_heads" and tuple(node.meta["val"].shape[-2:]) == shape


def _norm_operands(norm: fx.Node) -> dict[str, Any]:
    """weight, bias, eps and kind of an rms_norm or layer_norm, as norm_quantize and norm_heads have them."""
    given = ops.named(norm)
    kind = _NORMS[ops.name_of(norm.target) or ""]
    return {"weight": given["weight"], "bias": given.get("bias"), "eps": given["eps"], "kind": kind}


def _fuse_append(graph: Graph, node: fx.Node) -> bool:
    """q, k, v of one value; q, k normalized and rotated; k, v appended; attention -> rope_append, kv_attention.

    Factors of q after its norm become operands of rope_append. Norms become in-place norm_heads before it.
    """
    append: fx.Node = ops.operand(node, "cache")
    if ops.name_of(append.target) != "kv_append":
        return False
    given = ops.named(append)
    query, positions = ops.operand(node, "q"), given["positions"]
    wanted = [n for n in (query, given.pop("k"), given.pop("v")) if n is not None]
    parts = [part for n in wanted if (part := _heads_of(graph, n, positions, n is query))]
    if len(parts) != len(wanted):
        return False
    q, k, *v = parts
    if q.rope != k.rope or any(part.rope is not None or part.norm is not None or part.block for part in v):
        return False
    if q.center is not None or q.block != k.block:
        return False
    if q.rope is not None and q.rope["positions"] is not positions:
        return False
    if not (all(part.source is q.source for part in parts) and q.alone and k.alone):
        parts = _side_by_side(graph, node, parts)
        q, k = parts[:2]
    rope = {"inv_freq": None, "scaling": 1.0, "interleaved": False} | (q.rope or {})
    with graph.fx.inserting_before(node):
        source = q.source
        for part in (q, k):
            if part.norm is not None:
                where = {"offset": part.start, "heads": part.norm.blocks, "width": part.norm.width}
                source = graph.call("norm_heads", source, **part.norm.operands, **where)
        joined = graph.call(
            "rope_append",
            source,
            **(rope | given),
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
        picked = graph.call("slice_features", rotated, q.start, q.start + q.heads * q.head_dim)
        split = graph.call("split_heads", picked, q.heads)
    ops.set_operands(node, q=split)
    append.replace_all_uses_with(new_cache)
    graph.fx.erase_node(append)
    return True


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


def _fuse_add(graph: Graph, node: fx.Node) -> bool:
    """residual + gemm(..., store) -> gemm(..., add), when the gemm has no other user."""
    a, b = ops.operand(node, "a"), ops.operand(node, "b")
    for gemm, residual in ((a, b), (b, a)):
        if not (isinstance(gemm, fx.Node) and isinstance(residual, fx.Node)) or gemm is residual:
            return False
        is_gemm = ops.name_of(gemm.target) == "gemm"
        alone = is_gemm and len(gemm.users) == 1 and ops.operand(gemm, "epilogue") == "store"
        if not alone or graph.is_weight(residual) or residual.meta["val"].shape != gemm.meta["val"].shape:
            continue
        with graph.fx.inserting_before(node):
            fused = graph.call("gemm", **(ops.named(gemm) | {"residual": residual, "epilogue": "add"}))
        fused.meta["precision"] = gemm.meta.get("precision")
        graph.replace(node, fused)
        graph.fx.erase_node(gemm)
        return True
    return False
