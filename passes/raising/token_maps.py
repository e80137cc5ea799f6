"""Token numbers that a model changes before it reads its table, such as placeholders of images that become token 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from qcompile.passes.raising.evaluation import PositionEvaluator
from qcompile.passes.raising.facts import Constant, Facts
from qcompile.passes.raising.nodes import operator_name

ELEMENTWISE = {
    *("to", "_to_copy", "alias", "clone", "detach", "lift_fresh_copy", "contiguous", "where", "masked_fill"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_or", "logical_and", "logical_not", "clamp", "add", "sub"),
    *("bitwise_or", "bitwise_and", "bitwise_not", "__or__", "__and__", "index_put", "zeros_like", "full_like"),
}
"""Operators that compute the element at an index from the operands' elements at that index; see `_is_elementwise` for
index_put."""


def mapped(facts: Facts, index: fx.Node) -> Tensor | None:
    """For every token of the vocabulary, the number that `index` has in its place [V].

    None if `index` is not computed elementwise from the token numbers and constants alone.
    """
    seen: set[fx.Node] = set()
    frontier = [index]
    while frontier:
        node = frontier.pop()
        if (
            node in seen
            or node is facts.token_ids
            or (isinstance(facts.known.get(node), Constant) and _is_number(node))
        ):
            continue
        if node.op != "call_function" or not _is_elementwise(facts, node):
            return None
        seen.add(node)
        frontier += node.all_input_nodes
    if facts.token_ids not in {source for node in seen for source in node.all_input_nodes}:
        return None
    # Positions count 0, 1, ...: those of a text of the whole vocabulary are its token numbers.
    return PositionEvaluator(facts, facts.source.info.vocab_size).value(index)[0]


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.numel() == 1


def _is_elementwise(facts: Facts, node: fx.Node) -> bool:
    """Whether `node` has the shape of the token numbers, and computes each element from those at its index."""
    if operator_name(node) not in ELEMENTWISE or facts.shape(node) != facts.shape(facts.token_ids):
        return False
    if operator_name(node) != "index_put":
        return True
    target, chosen, value, *more = node.args  # target[mask] = number
    masks: Any = chosen
    alike = len(masks) == 1 and isinstance(masks[0], fx.Node) and masks[0].meta["val"].dtype == torch.bool
    return alike and facts.shape(masks[0]) == facts.shape(target) and _is_number(value) and not any(more)  # type: ignore[arg-type]
