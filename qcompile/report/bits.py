"""Bits per weight of a quantized graph."""

from __future__ import annotations

from qcompile import ops
from qcompile.formats import mixed_layout
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph


def linear_bits(graph: Graph) -> tuple[int, int]:
    """Packed bits of all linears, including scales and zeros, and the number of their weights."""
    bits = weights = 0
    for node in graph.calls("quantize_weight"):
        if all(ops.name_of(user.target) == "dequantize" for user in node.users):
            continue  # the table of an embedding
        n, k = ops.operand(node, "w").meta["val"].shape
        bits += 8 * sum(weight_format(ops.operand(node, "format")).packed_bytes(n, k).values())
        weights += n * k
    for node in graph.calls("quantize_mixed"):
        n, k = ops.operand(node, "w").meta["val"].shape
        bits += 8 * sum(
            mixed_layout.packed_bytes(
                mixed_layout.row_layout(graph.evaluate(ops.operand(node, "wide")), False), k
            ).values()
        )
        weights += n * k
    return bits, weights


def bits_per_weight(graph: Graph) -> float:
    """Packed bits of all linears divided by the number of their weights."""
    bits, weights = linear_bits(graph)
    return bits / max(weights, 1)
