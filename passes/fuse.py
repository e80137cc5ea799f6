"""Fuse: join neighbouring operators that one kernel does in one pass over memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.passes import fuse_heads
from qcompile.passes.base import Pass, PassResult


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
        fired += sum(fuse_heads.fuse(graph, node) for node in graph.calls("kv_attention"))
        fuse_heads.flatten(graph)
        fired += sum(_fuse_add(graph, node) for node in graph.calls("add"))
        graph.erase_dead()
        return PassResult(graph, fired)


def _fuse_norm(graph: Graph, node: fx.Node) -> bool:
    """quantize_activation(norm(x)) -> norm_quantize(x), when the norm has no other user."""
    norm: fx.Node = ops.operand(node, "x")
    dtype, group = ops.operand(node, "kind"), ops.operand(node, "group")
    kind = fuse_heads.NORM_KINDS.get(ops.name_of(norm.target) or "")
    if kind is None or len(norm.users) > 1 or dtype == "f32":
        return False
    with graph.fx.inserting_before(node):
        fused = graph.call(
            "norm_quantize", ops.operand(norm, "x"), **fuse_heads.norm_operands(norm), dtype=dtype, group=group
        )
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
