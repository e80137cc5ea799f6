"""Which ATen operators share memory with their operands, overwrite them, or return memory that nothing has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from qcompile.passes.raising.nodes import SHAPE_ONLY, Arguments, is_in_place, operator_name, unsupported

ALIASING = {
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t"),
    *("numpy_T", "mT", "swapaxes", "expand", "expand_as", "view_as", "broadcast_to", "alias", "contiguous", "detach"),
    *("to", "type_as", "slice", "narrow", "select", "split", "split_with_sizes", "chunk", "unbind", "tensor_split"),
    *("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "sum_to_size", "positive", "einsum"),
    *("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "broadcast_tensors", "meshgrid"),
    *("atleast_1d", "atleast_2d", "atleast_3d"),
}
"""Operators that may return memory of an operand, though not all of their schemas say so."""

LIKE_ANOTHER = {"type_as", "view_as", "expand_as", "reshape_as"}
"""Operators that read only the type or shape of their second operand."""

NEW_MEMORY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
"""Operators that return memory with arbitrary contents; `resize` keeps a part of the old contents."""

VMAP = "torch._functorch.predispatch"
"""The module of the functions that begin and end vmap in a trace."""


def overwritten(node: fx.Node) -> list[fx.Node]:
    """The operands that `node` overwrites: the first of aten.add_, `out` of aten.add.out."""
    targets: list[fx.Node] = []
    schema = getattr(node.target, "_schema", None)
    given = Arguments(node)
    for argument in schema.arguments if schema else ():
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = getattr(given, argument.name)
            targets += [item for item in (value if isinstance(value, (list, tuple)) else [value]) if item is not None]
    return targets or ([node.args[0]] if is_in_place(node) else [])  # type: ignore[list-item]


def run(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """The result of `node` for operands with values `value_of(operand)`.

    An operand that `node` overwrites is copied first, since other nodes may still need its value. A step of vmap is
    refused: it changes what the operators between it and the last step compute.
    """
    if getattr(node.target, "__module__", "") == VMAP:
        raise unsupported(node, "is a step of vmap, and cannot be run alone to see its values")
    targets = overwritten(node)

    def operand(source: fx.Node) -> Any:
        value = value_of(source)
        return value.clone() if source in targets and isinstance(value, Tensor) else value

    assert callable(node.target), node
    return node.target(*fx.node.map_arg(node.args, operand), **fx.node.map_arg(node.kwargs, operand))


def unwritten_reader(node: fx.Node) -> fx.Node | None:
    """A node that reads the new memory `node` before all of it is written; None if there is none."""
    value = node.meta.get("val")
    new = operator_name(node) in (*NEW_MEMORY, "resize", "resize_as")
    if not new or (isinstance(value, Tensor) and any(isinstance(size, int) and not size for size in value.shape)):
        return None
    frontier = [node]
    for member in frontier:
        for user in member.users:
            if operator_name(user) in SHAPE_ONLY or _overwrites(user, member):
                continue
            if member not in shared(user) or _memory_size(user) != _memory_size(node):
                return user
            frontier.append(user)
    return None


def _overwrites(node: fx.Node, target: fx.Node) -> bool:
    """Whether `node` writes all of `target` without reading it."""
    if target not in overwritten(node):
        return False
    return operator_name(node) in ("fill", "zero", "copy") or not is_in_place(node)


def _memory_size(node: fx.Node) -> str:
    """Number of elements, as text: comparing symbolic numbers would add conditions to the trace."""
    made = node.meta.get("val")
    return str(made.numel()) if isinstance(made, Tensor) else ""


def writes_alone(node: fx.Node) -> bool:
    """Whether no later node reads the tensors that `node` overwrites, through another view or otherwise."""
    return all(_is_last(node, target) for target in overwritten(node))


def _is_last(node: fx.Node, target: fx.Node) -> bool:
    """Whether only the result of `node` reads the memory of `target` after `node`."""
    family = [target]
    for member in family:
        family += [source for source in shared(member) if source not in family]
    if any(not shared(member) and member.op != "call_function" for member in family):
        # an input, or state that the next step reads unless copy_ resets it
        whole = operator_name(node) == "copy" and node.args[0] is target and len(family) == 1
        return whole and target.op == "get_attr" and len(target.users) == 1
    seen, frontier = {node}, list(family)
    while frontier:
        member = frontier.pop()
        for user in member.users:
            if user in seen:
                continue
            if user._sort_key > node._sort_key:
                return False
            seen.add(user)
            frontier += [user] if member in shared(user) else []
    return True


def shared(node: fx.Node) -> list[fx.Node]:
    """The operands with which the result of `node` may share memory."""
    if node.op != "call_function":
        return []
    inputs = node.all_input_nodes
    if operator_name(node) == "getitem":  # unless it is a view, each of several results has its own memory
        return inputs if shared(inputs[0]) else []
    if targets := overwritten(node):
        return targets
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    if operator_name(node) in LIKE_ANOTHER:
        return inputs[:1]
    if operator_name(node) in ALIASING or any(result.alias_info is not None for result in returns):
        return [source for source in inputs if not isinstance(source.meta.get("val"), torch.SymInt)]
    return [source for source in inputs if _memory(source) & _memory(node)]


def _memory(node: fx.Node) -> set[int]:
    """Identities of the storages of the tensors that `node` returns, as far as the trace has them."""
    made = node.meta.get("val")
    tensors = [each for each in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(each, Tensor)]
    try:
        return {each.untyped_storage()._cdata for each in tensors}
    except NotImplementedError:  # a tensor of tensors, as in vmap, which no later stage accepts
        return set()
