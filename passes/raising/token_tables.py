"""Features chosen by the token's number, as embeddings of placeholders: rows of one table for the vocabulary."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.passes.raising.builder import Builder, feature_sizes, working_sizes
from qcompile.passes.raising.facts import Facts, Known
from qcompile.passes.raising.nodes import TRANSPARENT, Arguments, operator_name
from qcompile.passes.raising.token_maps import mapped
from qcompile.passes.raising.values import identity

OF_EACH_TOKEN = ops.with_trait("elementwise") | {
    *("embedding", "linear", "rms_norm", "layer_norm", "mean", "mix", "hadamard"),
    *("slice_features", "gather_features", "split_heads", "merge_heads"),
}
"""Operators that compute what a token has from what their operands have for that token."""


def where(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """where(condition, yes, no) of features [B, T, F] by a condition on the token's number."""
    return _chosen(facts, build, node, *a.positional[:3])


def masked_fill(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Features [B, T, F] that a condition on the token's number replaces by a number."""
    return _chosen(facts, build, node, a.mask, a.value, a.input_)


def _chosen(facts: Facts, build: Builder, node: fx.Node, test: Any, yes: Any, no: Any) -> Known:
    """The features `yes` of the tokens that meet the condition, and `no` of the others: rows of a table of both.

    None unless condition and features depend on nothing but the number of the token in their place.
    """
    condition = _condition(facts, test)
    if condition is None:
        return None
    sides = [_side(facts, build, side, node) for side in (yes, no)]
    for side, needed in zip(sides, (condition, ~condition), strict=True):
        if bool(needed.all()) and isinstance(side, fx.Node) and len(feature_sizes(side)) == 1:
            return identity(side, ("B", "T", "F"), feature_sizes(side))
    widths = {feature_sizes(side) for side in sides if isinstance(side, fx.Node)}
    if None in sides or len(widths) != 1 or not all(_of_each_token(build, side) for side in sides):
        return None
    (width,) = widths
    parts = [_alone(build, side) if isinstance(side, fx.Node) else side for side in sides if side is not None]
    name = f"computed:.{node.name}"  # no module has a name with a colon
    build.out.info = replace(build.out.info, embeds_scale=0.0)  # no embedding given in a token's place is a row of it
    build.out.weights.add(name, (len(condition), *width), torch.float32, lambda: _table(condition, parts, width))
    return identity(build.call("embedding", build.token_ids, build.read(name)), ("B", "T", "F"), width)


def _condition(facts: Facts, test: Any) -> Tensor | None:
    """For every token of the vocabulary, whether it meets `test` [B, T, 1 or F] [V]; None if more decides."""
    tokens = facts.shape(facts.token_ids)
    if not isinstance(test, fx.Node) or test.meta["val"].dtype != torch.bool or test.meta["val"].dim() != 3:
        return None
    while test.meta["val"].dim() == 3:
        if operator_name(test) not in TRANSPARENT | {"unsqueeze"} or facts.shape(test)[:2] != tokens:
            return None
        test = test.args[0]
    return mapped(facts, test) if facts.shape(test) == tokens else None


def _side(facts: Facts, build: Builder, side: Any, node: fx.Node) -> fx.Node | float | None:
    """`side` as a raised tensor [B, T, F] or a number; None if it is neither."""
    number = facts.number(side)
    if number is not None:
        return number if math.isfinite(number) else None
    value = facts.plain(side)
    if value is None or value.base is None or value.dims != ("B", "T", "F"):
        return None
    return build.emit(value, working_sizes(value), node)


def _of_each_token(build: Builder, side: fx.Node | float | None) -> bool:
    """Whether `side` is a number, or computed from the number of the token in each place and weights alone."""
    frontier, seen = [side] if isinstance(side, fx.Node) else [], set()
    while frontier:
        node = frontier.pop()
        if node in seen or node is build.token_ids or node.op == "get_attr":
            continue
        if node.op != "call_function" or ops.name_of(node.target) not in OF_EACH_TOKEN:
            return False
        seen.add(node)
        frontier += node.all_input_nodes
    return True


def _alone(build: Builder, node: fx.Node) -> Graph:
    """A graph of token numbers that computes `node` alone, which stays when the raised graph is rewritten."""
    needed, frontier = {build.token_ids}, [node]
    while frontier:
        each = frontier.pop()
        if each not in needed:
            needed.add(each)
            frontier += each.all_input_nodes
    copied = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for each in build.out.fx.nodes:
        if each in needed:
            made[each] = copied.node_copy(each, made.__getitem__)
    copied.output(made[node])
    return Graph(copied, build.out.weights, build.out.info, build.out.stage)


def _table(condition: Tensor, parts: list[Graph | float], width: tuple[int, ...]) -> Tensor:
    """The table [V, F]: features from the first of `parts` for the tokens that meet the condition, else the second."""
    table = torch.empty(len(condition), *width)
    for part, rows in zip(parts, (condition, ~condition), strict=True):
        tokens = rows.nonzero()[:, 0]
        table[tokens] = part.run(tokens[None])[0].float() if isinstance(part, Graph) else float(part)
    return table
