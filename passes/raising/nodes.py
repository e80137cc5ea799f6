"""Facts about single ATen nodes: their names, and whether they write, may share memory, round, or draw at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

ALIASING = {
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t"),
    *("numpy_T", "mT", "swapaxes", "expand", "expand_as", "view_as", "broadcast_to", "alias", "contiguous", "detach"),
    *("to", "type_as", "slice", "narrow", "select", "split", "split_with_sizes", "chunk", "unbind", "tensor_split"),
    *("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "sum_to_size", "positive", "einsum"),
    *("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "broadcast_tensors", "meshgrid"),
    *("atleast_1d", "atleast_2d", "atleast_3d"),
}
"""Operators whose result may share memory with an operand, though not all of their schemas say so."""

DRAWING = {"feature_dropout", "feature_alpha_dropout", "rrelu", "random"}
"""Operators that draw at random without torch's tag for it."""

NEW_MEMORY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
"""Operators whose result holds whatever was in its memory before; `resize` keeps a part."""

SHAPE_ONLY = {"sym_size", "ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full"}
"""Operators that read only the shape of their first operand, not its values."""


class Arguments:
    """The arguments of an ATen call by schema name, with defaults filled in."""

    def __init__(self, node: fx.Node) -> None:
        self._found: dict[str, Any] = dict(node.kwargs)
        schema = getattr(node.target, "_schema", None)
        for place, argument in enumerate(schema.arguments if schema else ()):
            if place < len(node.args):
                self._found[argument.name] = node.args[place]
            elif argument.name not in self._found:
                self._found[argument.name] = argument.default_value if argument.has_default_value() else None
        self.positional: tuple[Any, ...] = node.args

    def __getattr__(self, name: str) -> Any:
        try:
            return self._found["self" if name == "input_" else name]
        except KeyError:
            raise AttributeError(name) from None


def operator_name(node: fx.Node) -> str:
    """`mul` for aten.mul.Tensor and aten.mul_, `qcompile::attention` for our operators, else the plain name."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", str(node.target))
    name = str(schema.name).removeprefix("aten::")
    return name[:-1] if is_in_place(node) else name


def is_in_place(node: fx.Node) -> bool:
    """Whether `node` is an ATen operator that overwrites its first operand, such as aten.add_."""
    name = str(getattr(getattr(node.target, "_schema", None), "name", ""))
    return name.startswith("aten::") and name.endswith("_") and not name.endswith("__")


# ---- memory ------------------------------------------------------------------------------------------


def written(node: fx.Node) -> list[fx.Node]:
    """The operands that `node` overwrites: the first of aten.add_, `out` of aten.add.out."""
    found: list[fx.Node] = []
    schema = getattr(node.target, "_schema", None)
    given = Arguments(node)
    for argument in schema.arguments if schema else ():
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = getattr(given, argument.name)
            found += [item for item in (value if isinstance(value, (list, tuple)) else [value]) if item is not None]
    return found or ([node.args[0]] if is_in_place(node) else [])  # type: ignore[list-item]


def run(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """What `node` computes from the values of its operands, which it does not overwrite: others may still need them."""
    targets = written(node)

    def operand(source: fx.Node) -> Any:
        value = value_of(source)
        return value.clone() if source in targets and isinstance(value, Tensor) else value

    assert callable(node.target), node
    return node.target(*fx.node.map_arg(node.args, operand), **fx.node.map_arg(node.kwargs, operand))


def unwritten_reader(node: fx.Node) -> fx.Node | None:
    """What reads the values of new memory `node` before all of it is written; None if nothing does."""
    value = node.meta.get("val")
    new = operator_name(node) in (*NEW_MEMORY, "resize", "resize_as")
    if not new or (isinstance(value, Tensor) and any(isinstance(size, int) and not size for size in value.shape)):
        return None
    frontier = [node]
    for member in frontier:
        for user in member.users:
            if operator_name(user) in SHAPE_ONLY or _overwrites(user, member):
                continue
            if member not in _shared(user) or _memory_size(user) != _memory_size(node):
                return user
            frontier.append(user)
    return None


def _overwrites(node: fx.Node, target: fx.Node) -> bool:
    """Whether `node` writes all of `target` without reading it."""
    if target not in written(node):
        return False
    return operator_name(node) in ("fill", "zero", "copy") or not is_in_place(node)


def _memory_size(node: fx.Node) -> str:
    made = node.meta.get("val")
    return str(made.numel()) if isinstance(made, Tensor) else ""  # as text, as comparing symbols sets conditions


def writes_alone(node: fx.Node) -> bool:
    """Whether nothing reads the tensors that `node` overwrites afterwards, through another view or otherwise."""
    return all(_is_last(node, target) for target in written(node))


def _is_last(node: fx.Node, target: fx.Node) -> bool:
    """Whether nothing but the result of `node` reads the memory of `target` after it."""
    family = [target]
    for member in family:
        family += [source for source in _shared(member) if source not in family]
    if any(not _shared(member) and member.op != "call_function" for member in family):
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
            frontier += [user] if member in _shared(user) else []
    return True


def _shared(node: fx.Node) -> list[fx.Node]:
    """The operands with which the result of `node` may share memory."""
    if node.op != "call_function":
        return []
    inputs = node.all_input_nodes
    if operator_name(node) == "getitem":  # unless it is a view, each of several results has its own memory
        return inputs if _shared(inputs[0]) else []
    if targets := written(node):
        return targets
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    if operator_name(node) in ALIASING or any(result.alias_info is not None for result in returns):
        return inputs
    return [source for source in inputs if _memory(source) & _memory(node)]


def _memory(node: fx.Node) -> set[int]:
    """What identifies the memory of the tensors of `node`, as far as the trace tells."""
    made = node.meta.get("val")
    tensors = [each for each in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(each, Tensor)]
    try:
        return {each.untyped_storage()._cdata for each in tensors}
    except NotImplementedError:  # a tensor of tensors, as in vmap, which no later stage takes
        return set()


# ---- values ------------------------------------------------------------------------------------------


def is_short(dtype: torch.dtype) -> bool:
    """Whether `dtype` is a floating-point type of fewer bits than float32."""
    return (dtype.is_floating_point and dtype.itemsize < 4) or (dtype.is_complex and dtype.itemsize < 8)


def rounds(node: fx.Node) -> bool:
    """Whether `node` makes values of a short type from longer ones: a cast, a reduction with a dtype, autocast."""
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or not is_short(made.dtype) or node.op != "call_function":
        return False
    given = [value for source in node.all_input_nodes if isinstance(value := source.meta.get("val"), Tensor)]
    types = [value.dtype for value in given if value.dim() or len(given) == 1]
    casts = operator_name(node) in ("to", "_to_copy", "type_as")
    types = types[:1] if casts else [dtype for dtype in types if dtype.is_floating_point or dtype.is_complex]
    return bool(types) and all(dtype not in (made.dtype, torch.bool) for dtype in types)


def draws(node: fx.Node) -> bool:
    """Whether the values of `node` are random: noise, or dropout that is not switched off."""
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if not tagged and operator_name(node) not in DRAWING:
        return False
    given = Arguments(node)
    chances = [getattr(given, name, 1) for name in ("p", "dropout", "dropout_p")]
    modes = [getattr(given, name, True) for name in ("train", "training")]
    return 0 not in chances and False not in modes
