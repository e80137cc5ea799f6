"""Raised tensors of the experts of a token: [B, T, k, F], one slot for each chosen expert.

Where one expert is chosen, the ATen tensors have no dimension of slots, so a Value does not show it. The raised tensors
keep the dimension until the slots are summed, as they do for several experts.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from qcompile import ops

PAIRS = "BTF"
"""The dimension of a value that has one row per pair of token and slot, if there are several slots."""

BY_SLOT = ("expert_linear", "scale_slots")
"""Operators with a dimension of slots in their result."""

ELEMENTWISE = ops.with_trait("elementwise")
"""Operators that keep the dimensions of their first operand."""


def is_one_slot(node: fx.Node | None) -> bool:
    """Whether the raised tensor `node` is [B, T, 1, F], computed by the only expert of each token."""
    if node is None or tuple(node.meta["val"].shape[2:3]) != (1,) or node.meta["val"].dim() != 4:
        return False
    source: Any = node
    while ops.name_of(source.target) in ELEMENTWISE:
        source = source.args[0]
    return ops.name_of(source.target) in BY_SLOT


def merging(node: fx.Node) -> tuple[Any, ...]:
    """The call that makes `node` [B, T, H, D] a tensor [B, T, F]: heads are merged, and a single slot is summed."""
    if not is_one_slot(node):
        return "merge_heads", node
    return ("combine", *node.args) if ops.name_of(node.target) == "scale_slots" else ("combine", node, None)
