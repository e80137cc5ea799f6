"""Operands of a node by the names in its operator's schema.

A node keeps its arguments by position, and leaves out trailing ones that have their default. Passes and code generation
read and change operands by name, so that they depend neither on the order of a schema nor on which are left out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import fx

from qcompile.ops.registry import op


@cache
def _places(target: Any) -> dict[str, int]:
    return {argument.name: index for index, argument in enumerate(target._schema.arguments)}


class Operands:
    """The operands of a node as attributes; one that the node leaves out has the default of the schema.

    Reading an operand that the operator does not have raises AttributeError naming the operator.
    """

    def __init__(self, node: fx.Node) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        target: Any = self._node.target
        index = _places(target).get(name)
        if index is None:
            raise AttributeError(f"{target} has no operand {name}")
        given = self._node.args
        return given[index] if index < len(given) else target._schema.arguments[index].default_value


def operands(node: fx.Node) -> Operands:
    """The operands of `node`, which calls one of qcompile's operators."""
    return Operands(node)


def operand(node: fx.Node, name: str) -> Any:
    """The operand `name` of `node`; the default of the schema if the node leaves it out."""
    return getattr(Operands(node), name)


def has_operand(node: fx.Node, name: str) -> bool:
    """Whether the operator of `node` has an operand `name` in its schema."""
    return name in _places(node.target)


def named(node: fx.Node) -> dict[str, Any]:
    """All operands of `node` by name, in the order of the schema, with the default of each that is left out."""
    return {name: operand(node, name) for name in _places(node.target)}


def set_operands(node: fx.Node, **values: Any) -> None:
    """Replace operands of `node` by name. Operands before them that the node leaves out are then given as defaults."""
    places = _places(node.target)
    last = max(places[name] for name in values)
    given = [operand(node, name) for name in list(places)[: max(last + 1, len(node.args))]]
    for name, value in values.items():
        given[places[name]] = value
    node.args = tuple(given)


def arguments(name: str, given: tuple[Any, ...], named_ones: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call of qcompile::name by position, from the first ones `given` and others by name.

    Trailing arguments without a value are left out. Raises TypeError for a name that the operator does not have, an
    argument that is given twice, and a missing argument that has no default.
    """
    schema = op(name)._schema.arguments
    places = {argument.name: index for index, argument in enumerate(schema)}
    if wrong := [key for key in named_ones if places.get(key, -1) < len(given)]:
        raise TypeError(f"qcompile::{name} has no further operand {wrong[0]}")
    last = max((places[key] for key in named_ones), default=len(given) - 1)
    rest = []
    for argument in schema[len(given) : last + 1]:
        if argument.name not in named_ones and not argument.has_default_value():
            raise TypeError(f"qcompile::{name} needs operand {argument.name}")
        rest.append(named_ones.get(argument.name, argument.default_value))
    return (*given, *rest)
