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
    norm, dtype, group = node.args
    assert isinstance(norm, fx.Node)
    kind = _NORMS.get(ops.name_of(norm.target) or "")
    if kind is None or len(norm.users) > 1 or dtype == "f32":
        return False
    with graph.fx.inserting_before(node):
        fused = graph.call("norm_quantize", norm.args[0], *_norm_arguments(norm), dtype, group)
    graph.replace(node, fused)
    graph.fx.erase_node(norm)
    return True


def _fuse_rotation(graph: Graph, node: fx.Node) -> bool:
    """quantize_activation(hadamard(x)) -> hadamard_quantize(x), when the rotated value has no other user."""
    turned, dtype, group = node.args
    assert isinstance(turned, fx.Node)
    if ops.name_of(turned.target) != "hadamard" or len(turned.users) > 1 or dtype == "f32":
        return False
    with graph.fx.inserting_before(node):
        fused = graph.call("hadamard_quantize", *turned.args, dtype, group)
    graph.replace(node, fused)
    graph.fx.erase_node(turned)
    return True


@dataclass(frozen=True)
class _Heads:
    """A value [M, H, D] read from `source` [M, F] starting at column `start`, optionally normalized and rotated.

    `norm` is (weight, bias, eps, kind, blocks, block width). `rope` and `turn` (of rotate_heads) are the operators'
    arguments after the value. `times` are the factors of the heads: a table [P, 1] indexed by position, and a weight
    [D] applied after RoPE. `alone` says that the values in between have no other users, so that the source's columns
    may be overwritten.
    """

    source: fx.Node
    start: int
    heads: int
    head_dim: int
    rope: tuple[Any, ...] | None
    norm: tuple[Any, ...] | None
    turn: tuple[Any, ...]
    times: tuple[fx.Node | None, fx.Node | None]
    alone: bool


class _Chain:
    """A walk from a value back through its producers: `nodes` are the nodes passed, `end` is the value reached."""

    def __init__(self, graph: Graph, end: Any) -> None:
        self.graph, self.nodes, self.end = graph, [], end  # type: tuple[Graph, list[fx.Node], Any]

    def take(self, *kinds: str) -> tuple[Any, ...] | None:
        """Step to the first operand of `end` if `end` is one of the operators `kinds`; returns its other operands."""
        if ops.name_of(self.end.target) not in kinds:
            return None
        self.nodes.append(self.end)
        operands: tuple[Any, ...] = self.end.args
        self.end = operands[0]
        return operands[1:]

    def take_norm(self, blocks: int, width: int) -> tuple[Any, ...] | None:
        """Step over `end` if it is a norm; returns its arguments and the number and column width of its blocks."""
        norm = self.end
        return None if self.take(*_NORMS) is None else (*_norm_arguments(norm), blocks, width)

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
        if row is None or ops.name_of(row.target) != "embedding" or row.args[0] is not positions:
            return None
        table: Any = row.args[1]
        if table.meta["val"].shape[1] != 1:
            return None
        self.take("mul")
        found: fx.Node = table
        return found

    def _factor(self) -> fx.Node | None:
        """The second operand of `end` if it is a product."""
        factor: fx.Node | None = self.end.args[1] if ops.name_of(self.end.target) == "mul" else None
        return factor


def _heads_of(graph: Graph, node: Any, positions: fx.Node, queries: bool = False) -> _Heads | None:
    """Match [turn] [rope] [norm] split_heads [norm] [slice] backwards from `node`; None if it does not match.

    With `queries`, the heads may also be multiplied by a table before the operand of split_heads, or by a weight after
    rope.
    """
    heads, head_dim = node.meta["val"].shape[-2:]
    chain = _Chain(graph, node)
    turn = chain.take("rotate_heads") or (None, 0)
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
    start = 0 if cut is None else cut[0]
    return _Heads(chain.end, start, heads, head_dim, rope, norm, turn, (table, weight), alone)


def _is_normed_in_heads(node: Any, shape: tuple[int, int]) -> bool:
    """Whether `node` is merge_heads(norm(split_heads(...))) with heads of `shape` (H, D)."""
    for kinds in (("merge_heads",), _NORMS):
        if ops.name_of(node.target) not in kinds:
            return False
        node = node.args[0]
    return ops.name_of(node.target) == "split_heads" and tuple(node.meta["val"].shape[-2:]) == shape


def _norm_arguments(norm: fx.Node) -> tuple[Any, ...]:
    """(weight, bias, eps, kind) of an rms_norm or layer_norm."""
    kind = _NORMS[ops.name_of(norm.target) or ""]
    _, weight, *rest = norm.args
    bias, eps = rest if kind == "layer" else (None, rest[0])
    return weight, bias, eps, kind


def _fuse_append(graph: Graph, node: fx.Node) -> bool:
    """q, k, v of one value; q, k normalized and rotated; k, v appended; attention -> rope_append, kv_attention.

    Factors of q after its norm become arguments of rope_append. Norms become in-place norm_heads before it.
    """
    append: Any = node.args[4]
    if ops.name_of(append.target) != "kv_append":
        return False
    k_node, v_node, *place, cache, layer, format = append.args
    parts = [_heads_of(graph, n, place[0], n is node.args[0]) for n in (node.args[0], k_node, v_node)]
    if any(p is None for p in parts):
        return False
    q, k, v = (p for p in parts if p is not None)
    if q.rope != k.rope or v.rope is not None or v.norm is not None:
        return False
    if q.turn != (None, k.turn[1]) or v.turn[1] or (q.rope is not None and q.rope[0] is not place[0]):
        return False
    if not (q.source is k.source is v.source and q.alone and k.alone):
        q, k, v = _side_by_side(graph, node, (q, k, v))
    inv_freq, scaling, interleaved = (None, 1.0, False) if q.rope is None else q.rope[1:]
    shape = (q.heads, k.heads, q.head_dim, scaling, interleaved, layer, format, *k.turn, *q.times)
    with graph.fx.inserting_before(node):
        source = q.source
        for part in (q, k):
            if part.norm is not None:
                *arguments, blocks, width = part.norm
                source = graph.call("norm_heads", source, *arguments, part.start, blocks, width)
        joined = graph.call("rope_append", source, inv_freq, *place, cache, [q.start, k.start, v.start], *shape)
        rotated, new_cache = (graph.fx.call_function(operator.getitem, (joined, i)) for i in (0, 1))
        graph.infer_node(rotated)
        graph.infer_node(new_cache)
        picked = graph.call("slice_features", rotated, q.start, q.start + q.heads * q.head_dim)
        query = graph.call("split_heads", picked, q.heads)
    node.update_arg(0, query)
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
    for gemm, residual in (node.args, node.args[::-1]):
        if not (isinstance(gemm, fx.Node) and isinstance(residual, fx.Node)) or gemm is residual:
            return False
        alone = ops.name_of(gemm.target) == "gemm" and len(gemm.users) == 1 and gemm.args[5] == "store"
        if not alone or graph.is_weight(residual) or residual.meta["val"].shape != gemm.meta["val"].shape:
            continue
        x, weight, bias, _, format, _, width = gemm.args
        with graph.fx.inserting_before(node):
            fused = graph.call("gemm", x, weight, bias, residual, format, "add", width)
        fused.meta["precision"] = gemm.meta.get("precision")
        graph.replace(node, fused)
        graph.fx.erase_node(gemm)
        return True
    return False
