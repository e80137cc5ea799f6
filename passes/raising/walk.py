"""The walk of raising: each ATen node in order, its rules one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, fx

from qcompile.graph import Graph
from qcompile.passes.raising import in_order, memory, scattered
from qcompile.passes.raising.aliasing import writes_alone
from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.facts import Constant, Facts, Known, Opaque, is_static
from qcompile.passes.raising.nodes import Arguments, is_random, operator_name, rounds, unsupported
from qcompile.passes.raising.values import Value
from qcompile.passes.raising.writes import write_part

Handler = Callable[[Facts, Builder, fx.Node, Arguments], Known]
"""A rule: the meaning of a node's result, or None if the rule does not apply to the node."""


def raise_graph(source: Graph, handlers: Mapping[str, tuple[Handler, ...]]) -> tuple[Graph, tuple[str, ...]]:
    """The raised graph of the ATen graph `source`, and notes for the user.

    `handlers` has the rules of each ATen operator in the order in which they are tried. Raises UnsupportedError, with
    the node, if the logits need a value without a meaning, or if a rule refuses a node.
    """
    facts = Facts(source)
    build = Builder(facts)
    for node in source.fx.nodes:
        if node.op == "get_attr":
            facts.known[node] = Constant(node)
        elif node.op == "call_function":
            facts.known[node] = _meaning(facts, build, node, handlers)
    result = source.output.args[0]
    logits = facts.require(result, "the output")
    if logits.dims != ("B", "T", "F"):
        raise unsupported(result, "is not logits [batch, tokens, vocabulary]")
    build.out.fx.output(build.emit(logits, logits.sizes, result))
    build.out.erase_dead()
    return build.out, tuple(build.notes)


def _meaning(facts: Facts, build: Builder, node: fx.Node, handlers: Mapping[str, tuple[Handler, ...]]) -> Known:
    """What the result of `node` means: a constant, the result of the first rule that applies, or Opaque."""
    value = node.meta.get("val")
    name = operator_name(node)
    if is_random(node):
        raise unsupported(node, "draws random numbers; only models that always compute the same are compiled")
    changes = name != "detach" and not writes_alone(node)
    if facts.is_constant(node) and not changes and (not isinstance(value, Tensor) or is_static(value)):
        facts.require_written(node)
        return Constant(node)
    if not isinstance(value, (Tensor, list, tuple)):
        return None
    if (copied := memory.fill(facts, build, node)) is not None:
        return copied
    if changes and (same := memory.rewrite_same(facts, node)) is not None:
        return same
    if changes:
        again = partial(_meaning, facts, build, handlers=handlers)
        rules = partial(_by_rules, facts, build, handlers=handlers)
        if (written := write_part(facts, build, node, again, rules)) is not None:
            return written
        raise unsupported(node, "changes a tensor in place that others read afterwards")
    if rounds(node) and any(isinstance(facts.known.get(source), Value) for source in node.all_input_nodes):
        raise unsupported(node, f"rounds to {node.meta['val'].dtype}, but models are compiled in float32")
    rules = partial(_by_rules, facts, build, node, handlers)
    known = scattered.lifted(facts, node, rules)
    if known is None:
        known = in_order.lifted(facts, node, lambda meanings: scattered.replaced(facts, meanings, rules))
    known = rules() if known is None else known
    return Opaque(node) if known is None else known


def _by_rules(facts: Facts, build: Builder, node: fx.Node, handlers: Mapping[str, tuple[Handler, ...]]) -> Known:
    """The result of the first rule that applies to `node`; None if there is none."""
    given = Arguments(node)
    results = (handler(facts, build, node, given) for handler in handlers.get(operator_name(node), ()))
    return next((known for known in results if known is not None), None)
