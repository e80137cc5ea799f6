"""Fuse: join neighbours that one kernel does in one pass over memory."""

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

    Each needs sole readers. The gate's activation was joined by `merge`, which must come before weights are rounded.
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
    """quantize_activation(norm(x)) -> norm_quantize(x), when nothing else reads the norm."""
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
    """quantize_activation(hadamard(x)) -> hadamard_quantize(x), when nothing else reads the rotated value."""
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
    """A value [M, H, D] read out of `source` [M, F] from column `start`, perhaps normalized, perhaps rotated.

    `norm` is (weight, bias, eps, kind, blocks, width of a block), `rope` and `turn` (of rotate_heads) the arguments
    after the value; `alone` says that nothing else reads what lies between, so that the source's columns may be
    overwritten.
    """

    source: fx.Node
    start: int
    heads: int
    head_dim: int
    rope: tuple[Any, ...] | None
    norm: tuple[Any, ...] | None
    turn: tuple[Any, ...]
    alone: bool


def _heads_of(node: Any) -> _Heads | None:
    """What the heads in `node` are made of, or None unless [turn] [rope] [norm] split_heads [norm] [slice]."""
    heads, head_dim = node.meta["val"].shape[-2:]
    chain, rope, norm, turn = [node], None, None, (None, 0)
    if ops.name_of(node.target) == "rotate_heads":
        turn = tuple(node.args[1:])
        chain.append(node.args[0])
    if ops.name_of(chain[-1].target) == "rope":
        rope = tuple(chain[-1].args[1:])
        chain.append(chain[-1].args[0])
    if ops.name_of(chain[-1].target) in _NORMS:
        norm = (*_norm_arguments(chain[-1]), heads, head_dim)
        chain.append(chain[-1].args[0])
    if ops.name_of(chain[-1].target) != "split_heads":
        return None
    source, start = chain[-1].args[0], 0
    if norm is None and ops.name_of(source.target) in _NORMS:
        norm = (*_norm_arguments(source), 1, heads * head_dim)
        chain.append(source)
        source = source.args[0]
    if ops.name_of(source.target) == "slice_features":
        chain.append(source)
        source, start = source.args[0], source.args[1]
    return _Heads(source, start, heads, head_dim, rope, norm, turn, all(len(n.users) == 1 for n in chain))


def _norm_arguments(norm: fx.Node) -> tuple[Any, ...]:
    """(weight, bias, eps, kind) of an rms_norm or layer_norm."""
    kind = _NORMS[ops.name_of(norm.target) or ""]
    _, weight, *rest = norm.args
    bias, eps = rest if kind == "layer" else (None, rest[0])
    return weight, bias, eps, kind


def _fuse_append(graph: Graph, node: fx.Node) -> bool:
    """q, k and v out of one value, q and k normalized and rotated, appended, attended -> rope_append, kv_attention.

    Norms become norm_heads in place before it.
    """
    append: Any = node.args[4]
    if ops.name_of(append.target) != "kv_append":
        return False
    k_node, v_node, *place, cache, layer, format = append.args
    parts = [_heads_of(n) for n in (node.args[0], k_node, v_node)]
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
    shape = (q.heads, k.heads, q.head_dim, scaling, interleaved, layer, format, *k.turn)
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
    """The same heads out of one value ahead of `node` that has their columns, and no other reader."""
    sources = list(dict.fromkeys(part.source for part in parts))
    widths = [source.meta["val"].shape[-1] for source in sources]
    starts = dict(zip(sources, accumulate([0, *widths]), strict=False))
    columns = [np.arange(part.heads * part.head_dim) + starts[part.source] + part.start for part in parts]
    with graph.fx.inserting_before(node):
        made = gathered(graph, sources, np.concatenate(columns))
    ends = accumulate([0, *(len(each) for each in columns)])
    return [replace(part, source=made, start=start, alone=True) for part, start in zip(parts, ends, strict=False)]


def _fuse_add(graph: Graph, node: fx.Node) -> bool:
    """residual + gemm(..., store) -> gemm(..., add), when nothing else reads the gemm."""
    for gemm, residual in (node.args, node.args[::-1]):
        if not (isinstance(gemm, fx.Node) and isinstance(residual, fx.Node)):
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
