"""Attention: heads, rotary embedding, grouped keys and values, and masks proven causal by running them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from qcompile.passes import raise_values as values
from qcompile.passes.raise_ops import Known, Raiser, operator_name
from qcompile.passes.raise_values import COS, ONE, SIN, Terms, Value, identity

LENGTHS_TRIED = (1, 2, 3, 8, 17, 64)
"""Sequence lengths at which a mask is run."""


def build(
    r: Raiser, node: fx.Node, inputs: Sequence[Value], scale: float, window: int, softcap: float, sinks: fx.Node | None
) -> Value:
    """qcompile::attention of q [B, T, H, D], k and v [B, T, Hk, D], as Values of those dimensions."""
    shapes = [_head_shape(r, node, value) for value in inputs]
    queries = shapes[0][0]
    group = min(_repeats(value, shape) for value, shape in zip(inputs[1:], shapes[1:], strict=True))
    if shapes[1][0] == queries and group > 1:
        inputs = [inputs[0], *(_ungrouped(v, shape, group) for v, shape in zip(inputs[1:], shapes[1:], strict=True))]
        shapes = [shapes[0], *((heads // group, size) for heads, size in shapes[1:])]
    if shapes[1][0] != shapes[2][0] or queries % shapes[1][0] or shapes[0][1] != shapes[1][1]:
        raise r.unsupported(node, f"has heads {shapes[0]}, {shapes[1]}, {shapes[2]} that do not fit together")
    q, k, v = (_heads(r, node, value, shape) for value, shape in zip(inputs, shapes, strict=True))
    made = r.call("attention", q, k, v, float(scale), int(window), float(softcap), sinks)
    return identity(made, ("B", "T", "F", "F"), (queries, shapes[2][1]))


def _head_shape(r: Raiser, node: fx.Node, value: Value) -> tuple[int, int]:
    """(heads, head size) of a [B, T, H, D] value."""
    dims = value.dims
    if value.base is None or len(dims) != 4 or dims[:2] != ("B", "T") or dims[2] not in ("", "F") or dims[3] != "F":
        raise r.unsupported(node, "takes queries, keys or values that are not [batch, tokens, heads, features]")
    return (1, value.sizes[0]) if dims[2] == "" else (value.sizes[0], value.sizes[1])


def _repeats(value: Value, shape: tuple[int, int]) -> int:
    """How many heads in a row are the same: what expanding grouped keys or values leaves."""
    terms = value.terms.reshape(len(value.terms), *shape)
    changes = [h for h in range(1, shape[0]) if not np.array_equal(terms[:, h], terms[:, h - 1])]
    starts = [0, *changes, shape[0]]
    runs = {b - a for a, b in itertools.pairwise(starts)}
    return runs.pop() if len(runs) == 1 else 1


def _ungrouped(value: Value, shape: tuple[int, int], group: int) -> Value:
    """Every `group`-th head."""
    terms = value.terms.reshape(len(value.terms), *shape)[:, ::group]
    return Value(value.base, ("B", "T", "F", "F"), terms)


def _heads(r: Raiser, node: fx.Node, value: Value, shape: tuple[int, int]) -> fx.Node:
    """The raised tensor [B, T, H, D] that `value` is, rotary embedding included."""
    if value.is_plain():
        return r.emit(value, shape, node)
    terms = value.terms.reshape(len(value.terms), *shape)
    rotation = _rotation(terms)
    if rotation is None:
        raise r.unsupported(node, "rotates its queries or keys in a way that is no rotary embedding")
    source, inv_freq, scaling, interleaved = rotation
    plain = Value(value.base, value.dims, values.make_terms(shape, source))
    made = r.emit(plain, shape, node)
    frequencies = r.constant("inv_freq", torch.from_numpy(inv_freq.astype(np.float32)))
    return r.call("rope", made, r.positions, frequencies, scaling, interleaved)


def _rotation(terms: Terms) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], float, bool] | None:
    """(source index [H, D], inv_freq [R/2], scaling, interleaved) when `terms` [n, H, D] are a rotary embedding."""
    own, other = _by_kind(terms, (ONE, COS)), _by_kind(terms, (SIN,))
    if own is None or other is None or (own["coef"] == 0).any() or (own["index"] < 0).any():
        return None
    turned = own["kind"] == COS
    rotary = int(turned[0].sum())
    if rotary == 0 or rotary % 2 or not turned[:, :rotary].all() or turned[:, rotary:].any():
        return None
    scaling = float(own["coef"][0, 0])
    if not (own["coef"][:, :rotary] == scaling).all() or not (own["coef"][:, rotary:] == 1).all():
        return None
    for interleaved in (False, True):
        inv_freq = own["freq"][0, :rotary:2] if interleaved else own["freq"][0, : rotary // 2]
        if _is_rotary(own, other, inv_freq, scaling, interleaved):
            return own["index"], inv_freq, scaling, interleaved
    return None


def _by_kind(terms: Terms, kinds: tuple[int, ...]) -> Terms | None:
    """The one term of each element with a kind in `kinds`, zero where there is none; None when there are two."""
    picked = np.isin(terms["kind"], kinds) & (terms["coef"] != 0)
    if (picked.sum(0) > 1).any():
        return None
    found = np.take_along_axis(terms, picked.argmax(0)[None], 0)[0]
    return np.where(picked.any(0), found, np.zeros((), terms.dtype))


def _is_rotary(own: Terms, other: Terms, inv_freq: np.ndarray[Any, Any], scaling: float, interleaved: bool) -> bool:
    """Whether feature i is cos * x[i] -+ sin * x[partner of i], as qcompile::rope has it."""
    half = len(inv_freq)
    place = np.arange(2 * half)
    pair, second = (place // 2, place % 2) if interleaved else (place % half, place // half)
    partner = place + np.where(second == 0, 1, -1) * (1 if interleaved else half)
    sign = np.where(second == 0, -1.0, 1.0)
    freq = inv_freq[pair]
    head = other[:, : 2 * half]
    return bool(
        (own["freq"][:, : 2 * half] == freq).all()
        and (head["freq"] == freq).all()
        and (head["index"] == own["index"][:, partner]).all()
        and (head["coef"] == sign * scaling).all()
        and not other[:, 2 * half :]["coef"].any()
    )


# ---- masks -------------------------------------------------------------------------------------------


def prove_mask(r: Raiser, node: fx.Node, mask: fx.Node | None, is_causal: bool) -> int:
    """The window of a mask (0: none) that must be causal; it is run at several lengths.

    `mask` is boolean (true: seen) or added to scores. Raises UnsupportedError when it is anything else.
    """
    if mask is None:
        if not is_causal:
            raise r.unsupported(node, "attends to later tokens; only causal decoders are compiled")
        return 0
    if is_causal:
        raise r.unsupported(node, "has a mask and is_causal at once")
    windows = {window_of(r, node, _run(r, mask, length), length) for length in LENGTHS_TRIED}
    cut = {w for w in windows if w}
    if len(cut) > 1:
        raise r.unsupported(node, f"has a window that depends on the length: {sorted(cut)}")
    return cut.pop() if cut else 0


def window_of(r: Raiser, node: fx.Node, mask: Tensor, length: int) -> int:
    """The window of a mask [.., length, length], 0 when it reaches the first token."""
    seen = mask if mask.dtype == torch.bool else mask > -1e4
    clean = mask.dtype == torch.bool or bool(((mask == 0) | (mask < -1e4)).all())
    if seen.shape[-2] not in (1, length) or seen.shape[-1] != length or not clean:
        raise r.unsupported(node, f"has a mask that is not causal but of shape {list(mask.shape)} and mixed values")
    rows = seen.expand(*seen.shape[:-2], length, length).reshape(-1, length, length)
    width = int(rows[0, -1].sum())
    place = torch.arange(length)
    distance = place[:, None] - place[None]
    if not (rows == ((distance >= 0) & (distance < width))).all():
        raise r.unsupported(node, "has a mask that is neither causal nor a causal sliding window")
    return 0 if width == length else width


def _run(r: Raiser, mask: fx.Node, length: int) -> Tensor:
    """The mask's value for one sequence of `length` tokens, whose ids it must not depend on."""
    found: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        if node not in found:
            found[node] = compute(node)
        return found[node]

    def compute(node: fx.Node) -> Any:
        if node.op == "placeholder":
            if node is r.token_ids:
                # Its shape may be asked for: ids that make any use of their values fail.
                return torch.full((1, length), torch.iinfo(torch.int64).min)
            return torch.arange(length)[None]
        if node.op == "get_attr":
            return r.evaluate(node)
        assert callable(node.target)
        return node.target(*fx.node.map_arg(node.args, value), **fx.node.map_arg(node.kwargs, value))

    if _reads_ids(r, mask):
        raise r.unsupported(mask, "makes a mask from token ids; only masks of positions are compiled")
    result: Tensor = value(mask)
    return result


def _reads_ids(r: Raiser, mask: fx.Node) -> bool:
    """Whether the values of the token ids reach `mask`; their shape may."""
    seen: set[fx.Node] = set()
    frontier = [mask]
    while frontier:
        node = frontier.pop()
        if node is r.token_ids:
            return True
        if node not in seen and not operator_name(node).startswith("sym_size"):
            seen.add(node)
            frontier += node.all_input_nodes
    return False


def match_product(r: Raiser, node: fx.Node) -> Known:
    """softmax(q @ k^T ...) @ v, written out."""
    return None
