"""Facts about single ATen nodes: names, arguments, rounding, randomness; and how patterns compare nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from qcompile.errors import PassError, UnsupportedError

RANDOM = {"feature_dropout", "feature_alpha_dropout", "rrelu", "random"}
"""Operators that draw random numbers without torch's tag for it."""

SHAPE_ONLY = {"sym_size", "ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full"}
"""Operators that read only the shape of their first operand, not its values."""

POINTWISE = {"sigmoid", "silu", "gelu", "relu", "tanh", "mul", "multiply"}
"""Operators that compute each element from the elements in its place."""

TRANSPARENT = {"to", "_to_copy", "alias", "contiguous", "clone", "detach", "dropout", "expand", "expand_as", "type_as"}
"""Operators that patterns look through where they do not change values."""


class Arguments:
    """The arguments of an ATen call by schema name (`self` as `input_`), with defaults filled in."""

    def __init__(self, node: fx.Node) -> None:
        self._given: dict[str, Any] = dict(node.kwargs)
        schema = getattr(node.target, "_schema", None)
        for place, argument in enumerate(schema.arguments if schema else ()):
            if place < len(node.args):
                self._given[argument.name] = node.args[place]
            elif argument.name not in self._given:
                self._given[argument.name] = argument.default_value if argument.has_default_value() else None
        self.positional: tuple[Any, ...] = node.args

    def __getattr__(self, name: str) -> Any:
        try:
            return self._given["self" if name == "input_" else name]
        except KeyError:
            raise AttributeError(name) from None


def operator_name(node: fx.Node) -> str:
    """`mul` for aten.mul.Tensor and aten.mul_, `qcompile::attention` for qcompile's operators, else the plain name."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", str(node.target))
    name = str(schema.name).removeprefix("aten::")
    return name[:-1] if is_in_place(node) else name


def is_in_place(node: fx.Node) -> bool:
    """Whether `node` is an ATen operator that overwrites its first operand, such as aten.add_."""
    name = str(getattr(getattr(node.target, "_schema", None), "name", ""))
    return name.startswith("aten::") and name.endswith("_") and not name.endswith("__")


def unsupported(node: Any, reason: str) -> UnsupportedError:
    """The error that `node` cannot be compiled for `reason`; names the operator, and its module if the trace does."""
    operator = operator_name(node) if isinstance(node, fx.Node) else node
    return PassError("raise", str(node), f"{operator} {reason}{_origin(node)}")


def _origin(node: Any) -> str:
    """The module of the model to which `node` belongs, if the trace names it."""
    stack = node.meta.get("nn_module_stack") if isinstance(node, fx.Node) else None
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    path = path.removeprefix("module").removeprefix(".") or "the model itself"
    return f"; in {path} ({str(kind).rpartition('.')[2]})"


# ---- rounding and randomness ---------------------------------------------------------------------------


def _is_short(dtype: torch.dtype) -> bool:
    """Whether `dtype` is a floating-point type of fewer bits than float32."""
    return (dtype.is_floating_point and dtype.itemsize < 4) or (dtype.is_complex and dtype.itemsize < 8)


def rounds(node: fx.Node) -> bool:
    """Whether `node` makes values of a short type from longer ones: a cast, a reduction with a dtype, autocast."""
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or not _is_short(made.dtype) or node.op != "call_function":
        return False
    given = [value for source in node.all_input_nodes if isinstance(value := source.meta.get("val"), Tensor)]
    types = [value.dtype for value in given if value.dim() or len(given) == 1]
    casts = operator_name(node) in ("to", "_to_copy", "type_as")
    types = types[:1] if casts else [dtype for dtype in types if dtype.is_floating_point or dtype.is_complex]
    return bool(types) and all(dtype not in (made.dtype, torch.bool) for dtype in types)


def is_random(node: fx.Node) -> bool:
    """Whether the values of `node` are random: noise, or dropout that is not switched off."""
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if not tagged and operator_name(node) not in RANDOM:
        return False
    given = Arguments(node)
    chances = [getattr(given, name, 1) for name in ("p", "dropout", "dropout_p")]
    modes = [getattr(given, name, True) for name in ("train", "training")]
    return 0 not in chances and False not in modes


# ---- patterns ------------------------------------------------------------------------------------------


def strip(item: Any, booleans: bool = False) -> Any:
    """The node that `item` copies or casts without a change of values; with `booleans`, through casts to booleans."""
    while isinstance(item, fx.Node) and operator_name(item) in TRANSPARENT and not _changes(item, booleans):
        item = item.args[0]
    return item


def _changes(item: Any, booleans: bool) -> bool:
    """Whether a cast changes values: to integers, booleans or real numbers, or to a short type."""
    made, given = item.meta["val"].dtype, item.args[0].meta["val"].dtype
    if made == torch.bool and booleans:
        return False
    narrower = given.is_floating_point and not made.is_floating_point
    return rounds(item) or narrower or (made == torch.bool != given) or (given.is_complex and not made.is_complex)


def is_call(item: Any, *names: str) -> bool:
    """Whether `item` calls one of the ATen operators `names` in its plain form.

    A call that rounds to a short type is not plain, nor are add and sub with alpha, nor div with a rounding mode.
    """
    if not isinstance(item, fx.Node) or item.op != "call_function" or operator_name(item) not in names or rounds(item):
        return False
    more = (*item.args[2:], *item.kwargs.values()) if operator_name(item) in ("add", "sub", "div") else ()
    return all(value in (None, 1) for value in more)


def both_orders(node: fx.Node) -> list[tuple[Any, Any]]:
    """The two operands of a commutative operator in both orders, with casts stripped."""
    a, b = strip(node.args[0]), strip(node.args[1])
    return [(a, b), (b, a)]


def is_over_last(node: fx.Node) -> bool:
    """Whether a reduction is over the last dimension and keeps it with size 1."""
    rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    dims = node.args[1] if len(node.args) > 1 else None
    keep = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
    return isinstance(dims, (list, tuple)) and [d % rank for d in dims] == [rank - 1] and bool(keep)
