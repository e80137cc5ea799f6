"""The handlers of raising: for each ATen operator, one small function that maps known inputs to a known result.

A handler gets the raiser, the node and its arguments by schema name. It returns what the result is, or None when
the result has no meaning of its own (it is then `Opaque`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from qcompile.passes.raising import attention, masks, patterns, tables, values
from qcompile.passes.raising.nodes import Arguments, operator_name
from qcompile.passes.raising.raiser import LENGTHS, Known, Opaque, Raiser, Spread, Weight, features
from qcompile.passes.raising.slots import is_one_slot
from qcompile.passes.raising.values import Value, identity

Handler = Callable[[Raiser, fx.Node, Arguments], Known]
HANDLERS: dict[str, Handler] = {}


WHOLE = (torch.int32, torch.int64)
"""Integer types wide enough for every position."""


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for the overloads of the ATen operators `names`."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


# ---- identities and layout -----------------------------------------------------------------------------


@handles("alias", "contiguous", "clone", "detach", "lift_fresh_copy", "dropout", "feature_dropout", "_to_copy", "to")
def _same(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    source = a.positional[0]
    known = r.known.get(source)
    if isinstance(known, Opaque):
        return known if source is r.token_ids and not node.meta["val"].is_floating_point() else None
    given, made = source.meta["val"].dtype, node.meta["val"].dtype
    holds = made.is_floating_point or made == given or (made in WHOLE and not given.is_floating_point)
    return known if holds else None


@handles("type_as", "expand_as", "view_as", "reshape_as")
def _as_other(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    kind = HANDLERS["to" if "type" in str(node.target) else "expand" if "expand" in str(node.target) else "view"]
    return kind(r, node, a)


@handles("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze")
def _view(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    known = r.known.get(a.positional[0])
    if node.meta["val"].dtype != a.positional[0].meta["val"].dtype:  # view(dtype) reinterprets the bits
        return None
    if isinstance(known, Opaque) and known.node is r.token_ids and r.shape(node) == r.shape(r.token_ids):
        return known
    if isinstance(known, Spread):
        return known if r.shape(node) == r.shape(known.node) else None
    value = r.value(a.positional[0])
    return value and values.reshape(value, r.shape(node), LENGTHS)


@handles("expand", "broadcast_to")
def _expand(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    source, shape = a.positional[0], r.shape(node)
    if isinstance(r.known.get(source), Weight) and shape == [LENGTHS["B"], *r.shape(source)]:
        return Spread(node, source)
    value = r.value(a.positional[0])
    return value and values.expand(value, r.shape(node), LENGTHS)


@handles("unsqueeze")
def _unsqueeze(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value = r.value(a.input_)
    return value and values.unsqueeze(value, a.dim % (len(value.dims) + 1))


@handles("permute")
def _permute(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value = r.value(a.input_)
    return value and values.permute(value, a.dims)


@handles("transpose", "swapaxes")
def _transpose(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value = r.value(a.positional[0])
    if value is None:
        return None
    order = list(range(len(value.dims)))
    first, second = (d % len(order) for d in a.positional[1:3])
    order[first], order[second] = second, first
    return values.permute(value, order)


@handles("t", "numpy_T", "mT")
def _turn(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value = r.value(a.positional[0])
    return value and values.permute(value, [*range(len(value.dims) - 2), -1, -2])


# ---- selecting features --------------------------------------------------------------------------------


@handles("slice")
def _slice(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    if r.shape(node) == r.shape(a.input_):
        return r.known[a.input_]
    if isinstance(r.known.get(a.input_), Weight):
        first = a.start in (0, None) and a.step in (1, None)
        return tables.rows_of(r, node, a.input_, a.dim % len(r.shape(node))) if first else None
    value = r.value(a.input_)
    if value is None or not all(isinstance(n, (int, type(None))) for n in (a.start, a.end, a.step)):
        return None
    return values.cut(value, a.dim % len(value.dims), slice(a.start, a.end, a.step))


@handles("narrow")
def _narrow(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value = r.value(a.input_)
    if value is None or not isinstance(a.start, int) or not isinstance(a.length, int):
        return None
    dim = a.dim % len(value.dims)
    start = a.start + r.shape(a.input_)[dim] if a.start < 0 else a.start
    return values.cut(value, dim, slice(start, start + a.length))


@handles("select")
def _select(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value = r.value(a.input_)
    if value is None or not isinstance(a.index, int):
        return None
    return values.select(value, a.dim % len(value.dims), a.index)


@handles("split", "split_with_sizes", "chunk", "unbind", "tensor_split")
def _split(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value = r.value(a.positional[0])
    if value is None:
        return None
    dim = (a.dim or 0) % len(value.dims)
    if "unbind" in str(node.target):
        return [values.select(value, dim, i) for i in range(len(node.meta["val"]))]
    sizes = [r.length(piece.shape[dim]) for piece in node.meta["val"]]
    stops = np.cumsum(sizes).tolist()
    return [values.cut(value, dim, slice(stop - size, stop)) for size, stop in zip(sizes, stops, strict=True)]


@handles("getitem")
def _getitem(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    pieces = r.known.get(node.args[0])  # type: ignore[arg-type]
    if isinstance(pieces, (list, tuple)) and isinstance(node.args[1], int):
        found: Known = pieces[node.args[1]]
        return found
    return None


@handles("index_select")
def _index_select(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    index = r.known.get(a.index)
    if isinstance(r.known.get(a.input_), Weight) and not isinstance(index, Weight):
        return _lookup(r, a.input_, a.index) if a.dim == 0 and a.input_.meta["val"].dim() == 2 else None
    value = r.value(a.input_)
    if value is None or not isinstance(index, Weight):
        return None
    return values.take(value, a.dim % len(value.dims), r.evaluate(index.node).numpy())


@handles("index")
def _index(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    given = [(dim, index) for dim, index in enumerate(a.indices) if index is not None]
    if len(given) != 1 or given[0][1].meta["val"].dtype not in WHOLE:
        return None
    ((dim, index),) = given
    if isinstance(r.known.get(a.input_), Weight) and len(a.indices) == 1 and len(a.input_.meta["val"].shape) == 2:
        return _lookup(r, a.input_, index)
    value, chosen = r.value(a.input_), r.known.get(index)
    if value is None or not isinstance(chosen, Weight) or index.meta["val"].dim() != 1:
        return None
    return values.take(value, dim, r.evaluate(chosen.node).numpy())


@handles("repeat_interleave")
def _repeat_interleave(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value, count = r.value(a.positional[0]), a.positional[1]
    if value is None or not isinstance(count, int) or a.dim is None:
        return None
    return values.repeat(value, a.dim % len(value.dims), count, inner=True)


@handles("repeat", "tile")
def _repeat(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value: Value | None = r.value(a.positional[0])
    counts = a.positional[1]
    if value is None or not all(isinstance(c, (int, fx.Node)) for c in counts):
        return None
    value = Value(value.base, ("",) * (len(counts) - len(value.dims)) + value.dims, value.terms)
    for dim, count in enumerate(counts):
        if value is not None and count != 1:
            missing = value.dims[dim] == "" and isinstance(count, fx.Node)
            value = value if missing else values.repeat(value, dim, int(count), inner=False)
    return value


@handles("cat", "concat")
def _cat(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    pieces = [r.value(piece) for piece in a.tensors]
    found = [piece for piece in pieces if piece is not None]
    return values.concatenate(found, (a.dim or 0) % len(found[0].dims)) if len(found) == len(pieces) else None


@handles("stack")
def _stack(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    pieces = [r.value(piece) for piece in a.tensors]
    found = [piece for piece in pieces if piece is not None]
    if len(found) != len(pieces):
        return None
    dim = (a.dim or 0) % (len(found[0].dims) + 1)
    return values.concatenate([values.unsqueeze(piece, dim) for piece in found], dim)


# ---- positions -----------------------------------------------------------------------------------------


@handles("arange")
def _arange(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """arange over the tokens becomes the step's position plus `start`; it replaces the model's own counting."""
    start = getattr(a, "start", 0) or 0
    if r.shape(node) != [LENGTHS["T"]] or not isinstance(start, int) or getattr(a, "step", 1) not in (None, 1):
        return None
    if node.meta["val"].dtype not in (*WHOLE, torch.float32, torch.float64):  # too short for every position
        return None
    place = Value(None, ("T",), values.make_terms((), kind=values.POSITION))
    return values.add(place, Value(None, (), values.make_terms((), coef=float(start))))


@handles("cos", "sin")
def _trigonometric(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value = r.value(a.input_)
    kind = values.COS if "cos" in str(node.target) else values.SIN
    return value and values.trigonometric(value, kind)


@handles("embedding")
def _embedding(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    return _lookup(r, a.weight, a.indices)


def _lookup(r: Raiser, table: fx.Node, index: fx.Node) -> Known:
    """Rows of a table: the token embedding, or learned positions, whose offset is folded into the table."""
    known = r.known.get(index)
    if not isinstance(r.known.get(table), Weight):
        return None
    width = int(table.meta["val"].shape[1])
    if isinstance(known, Opaque) and known.node is r.token_ids:
        return identity(r.call("embedding", r.ids, r.weight(table)), ("B", "T", "F"), (width,))
    if not isinstance(known, Value) or known.base is not None or known.sizes:
        return None
    terms = {int(term["kind"]): float(term["coef"]) for term in known.terms}
    offset = terms.pop(values.ONE, 0.0)
    if terms != {values.POSITION: 1.0} or offset < 0 or offset % 1 or not any("T" in dim for dim in known.dims):
        return None
    tables.require_rows(r, table, int(table.meta["val"].shape[0] - offset))
    rows = r.rows_from(table, int(offset))
    return identity(r.call("embedding", r.positions, rows), (*known.dims, "F"), (width,))


# ---- arithmetic ----------------------------------------------------------------------------------------


@handles("neg")
def _neg(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value = r.value(a.input_)
    return value and value.scaled(-1.0)


@handles("mul", "multiply")
def _mul(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    left, right = a.positional[:2]
    return patterns.match_product(r, node) or _product(r, left, right)


def _product(r: Raiser, left: Any, right: Any) -> Known:
    for x, factor in ((left, right), (right, left)):
        number = r.number(factor)
        if number is not None:
            scaled = r.value(x)
            return scaled and scaled.scaled(number)
    for x, factor in ((left, right), (right, left)):
        known = r.known.get(factor)
        value = r.known.get(x)
        if isinstance(value, Value) and value.base is not None and isinstance(known, Weight):
            return patterns.with_weight(r, "mul", x, factor)
    first, second = r.value(left), r.value(right)
    if first is None or second is None:
        return None
    if first.base is not None and second.base is not None:
        first, second = (tables.as_rotary(r, value) or value for value in (first, second))
    if first.base is not None and second.base is not None:
        return _both(r, "mul", first, second, left)
    return values.multiply(first, second)


@handles("div", "true_divide")
def _div(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    left, right = a.positional[:2]
    if getattr(a, "rounding_mode", None) is not None:
        return None
    number = r.number(right)
    if number:
        value = r.value(left)
        return value and value.scaled(1.0 / number)
    return patterns.match_quotient(r, node)


@handles("add", "sub")
def _add(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    left, right = a.positional[:2]
    sign = (-1.0 if "sub" in str(node.target) else 1.0) * float(a.alpha if isinstance(a.alpha, (int, float)) else 1)
    number = r.number(right)
    if number is not None:
        table, offset = r.known.get(left), Value(None, (), values.make_terms((), coef=sign * number))
        return values.add(table, offset) if isinstance(table, Value) and table.base is None else None
    for x, bias in ((left, right), (right, left)):
        value, known = r.known.get(x), r.known.get(bias)
        if isinstance(value, Value) and value.base is not None and isinstance(known, Weight) and sign == 1:
            return patterns.with_weight(r, "add", x, bias)
    first, second = r.value(left), r.value(right)
    if first is None or second is None:
        return None
    second = second if sign == 1 else second.scaled(sign)
    if first.is_plain() and second.is_plain():
        return _both(r, "add", first, second, node)
    return values.add(first, second)


def _both(r: Raiser, name: str, a: Value, b: Value, node: Any) -> Known:
    """An elementwise operator on two raised tensors with the same layout."""
    aligned = values.align(a, b)
    if aligned is None or not (a.sizes == b.sizes == aligned[1].shape[1:]):
        return None
    own, other = working_sizes(a), working_sizes(b)
    sizes = own if own == other else (a.count,)  # any layout will do, since the operator is elementwise
    made = r.call(name, r.emit(a, sizes, node), r.emit(b, sizes, node))
    return identity(made, aligned[0], a.sizes)


def working_sizes(value: Value) -> tuple[int, ...]:
    """The shape in which to apply an elementwise operator: the value's own if it has one or two feature axes.

    A single slot, which the value does not show, is kept.
    """
    if is_one_slot(value.base):
        return (1, value.count)
    return value.sizes if 1 <= len(value.sizes) <= 2 else (value.count,)


@handles("silu", "gelu", "relu", "tanh", "sigmoid", "mish", "elu")
def _unary(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    if any(getattr(a, name, 1) != 1 for name in ("alpha", "scale", "input_scale")):  # arguments of elu
        return None
    kind = "gelu_tanh" if getattr(a, "approximate", "none") == "tanh" else operator_name(node)
    return elementwise(r, node, a.positional[0], "unary", kind)


def elementwise(r: Raiser, node: fx.Node, source: fx.Node, name: str, *more: Any) -> Known:
    """qcompile::name applied to `source`, with further arguments `more`."""
    value = r.known.get(source)
    if not isinstance(value, Value) or value.base is None:
        return None
    made = r.call(name, r.emit(value, working_sizes(value), node), *more)
    return identity(made, value.dims, value.sizes)


@handles("where")
def _where(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    return patterns.match_where(r, node)


@handles("pow", "square")
def _pow(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    return patterns.match_power(r, node)


# ---- norms and linears ---------------------------------------------------------------------------------


@handles("rms_norm")
def _rms_norm(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    eps = torch.finfo(torch.float32).eps if a.eps is None else a.eps
    return patterns.norm(r, node, a.input, "rms_norm", (a.weight,), eps) if len(a.normalized_shape) == 1 else None


@handles("layer_norm", "native_layer_norm")
def _layer_norm(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    if len(a.normalized_shape) != 1:
        return None
    made = patterns.norm(r, node, a.input, "layer_norm", (a.weight, a.bias), a.eps)
    return [made, None, None] if "native" in str(node.target) else made


@handles("linear")
def _linear(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    if not isinstance(r.known.get(a.weight), Weight):
        return None
    return linear(r, node, a.input, r.weight(a.weight), a.bias)


@handles("addmm")
def _addmm(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    if a.alpha not in (None, 1) or a.beta not in (None, 1) or not isinstance(r.known.get(a.mat2), Weight):
        return None
    return linear(r, node, a.mat1, r.transposed(a.mat2), a.input_)


@handles("mm", "matmul", "bmm")
def _matmul(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    left, right = a.positional[:2]
    source = r.known.get(left)
    has_base = isinstance(source, Value) and source.base is not None
    known = r.known.get(right)
    if has_base and isinstance(known, (Weight, Spread)):
        matrix = known.weight if isinstance(known, Spread) else right
        return linear(r, node, left, r.transposed(matrix), None) if matrix.meta["val"].dim() == 2 else None
    return _outer(r, left, right) or masks.match_attention(r, node)


def _outer(r: Raiser, left: fx.Node, right: fx.Node) -> Known:
    """[.., N, 1] @ [.., 1, M] is an outer product: many models multiply positions by frequencies this way."""
    if left.meta["val"].shape[-1] != 1:
        return None
    first, second = r.value(left), r.value(right)
    if first is None or second is None or (first.base or second.base) is not None:
        return None
    return values.multiply(first, second)


def linear(r: Raiser, node: fx.Node, source: fx.Node, weight: fx.Node, bias: fx.Node | None) -> Known:
    """qcompile::linear of `source`, whose last dimension must hold all features."""
    return linear_of(r, node, r.require(source, f"linear {node}"), weight, bias)


def linear_of(r: Raiser, node: fx.Node, value: Value, weight: fx.Node, bias: fx.Node | None = None) -> Value:
    """qcompile::linear of `value`, whose last dimension must hold all features."""
    if value.base is None or value.dims[-1] != "F" or any("F" in dim for dim in value.dims[:-1]):
        raise r.unsupported(node, "is a linear over something else than the features of a token")
    if bias is not None and not isinstance(r.known.get(bias), Weight):
        raise r.unsupported(node, "has a bias that is not a weight")
    if bias is not None and bias.meta["val"].numel() != weight.meta["val"].shape[0]:
        raise r.unsupported(node, "has one bias for several features")
    extra = () if bias is None else (r.vector(bias),)
    made = r.call("linear", r.emit(value, value.sizes, node), weight, *extra)
    return identity(made, value.dims, features(made))


# ---- attention -----------------------------------------------------------------------------------------


@handles("qcompile::attention")
def _attention(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    sinks = None if a.sinks is None else r.weight(a.sinks)
    inputs = [r.require(t, f"attention {node}") for t in (a.q, a.k, a.v)]
    return attention.build(r, node, inputs, a.scale, a.window, a.softcap, sinks)


@handles("scaled_dot_product_attention")
def _sdpa(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    if a.dropout_p:
        raise r.unsupported(node, "has dropout; export the model in evaluation mode")
    inputs = [values.permute(r.require(t, f"attention {node}"), (0, 2, 1, 3)) for t in (a.query, a.key, a.value)]
    scale = 1 / math.sqrt(a.query.meta["val"].shape[-1]) if a.scale is None else float(a.scale)
    given = [] if a.attn_mask is None else [(a.attn_mask, "added", 1.0)]
    seen = masks.prove_mask(r, node, given, a.is_causal)
    made = attention.build(r, node, inputs, scale, seen.window, 0.0, None, seen.key_bias)
    return values.permute(made, (0, 2, 1, 3))
