"""Masks, proven causal by running them, and attention written as matmul, softmax, matmul."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from qcompile.passes.raising import attention, values
from qcompile.passes.raising.nodes import SHAPE_ONLY, operator_name, run
from qcompile.passes.raising.patterns import is_call, pair, strip
from qcompile.passes.raising.raiser import Known, Raiser
from qcompile.passes.raising.values import Value

LENGTHS_TRIED = (1, 2, 3, 8, 17, 64, 257)
"""Sequence lengths at which a mask is run, in addition to the model's maximum."""

LONGEST_MASK = 4096
"""Maximum number of tokens of a mask; a larger one would take too much memory to run."""

HIDDEN = -1e4
"""Scores below this count as hidden: models add values from -10,000 down to minus infinity."""

Mask = tuple[fx.Node, str, float]
"""A mask, its meaning (`seen` or `hidden`: boolean; `added`: added to the scores), and the factor it is scaled by."""


@dataclass(frozen=True)
class Seen:
    """The combined effect of masks: a causal `window` (0: none), and a bias added per key position, f32 [H, P]."""

    window: int
    key_bias: Tensor | None = None


def prove_mask(r: Raiser, node: fx.Node, masks: Sequence[Mask], is_causal: bool) -> Seen:
    """Run `masks` at several lengths to prove that together they are a causal mask, optionally with a bias per key.

    Raises UnsupportedError naming `node` if they are anything else.
    """
    key = (*masks, is_causal)
    if key not in r.proven:
        r.proven[key] = _prove(r, node, masks, is_causal)
    return r.proven[key]


def _prove(r: Raiser, node: fx.Node, masks: Sequence[Mask], is_causal: bool) -> Seen:
    for mask, *_ in masks:
        if reads_ids(r, mask):
            raise r.unsupported(mask, "makes a mask from token ids; only masks of positions are compiled")
    if not masks and not is_causal:
        raise r.unsupported(node, "attends to later tokens; only causal decoders are compiled")
    windows: dict[int, int] = {}
    longest = r.source.info.max_position
    if masks and longest > LONGEST_MASK:
        raise r.unsupported(
            node, f"has an explicit mask of {longest} positions; beyond {LONGEST_MASK} use is_causal=True"
        )
    for mask, *_ in masks:
        _require_one_for_all(r, mask)
    table: Tensor | None = None
    for length in sorted({min(length, longest) for length in (*LENGTHS_TRIED, longest)}, reverse=True) if masks else ():
        seen = torch.ones(length, length, dtype=torch.bool).tril() if is_causal else torch.ones(1, 1, dtype=torch.bool)
        biases = []
        for mask, meaning, factor in masks:
            shown, bias = _visibility(Run(r, length).value(mask), meaning, factor)
            seen = seen & shown
            biases += [] if bias is None else [bias.expand(*bias.shape[:-1], length)]
        windows[length] = _window(r, node, seen, length)
        total = sum(biases[1:], biases[0]) if biases else None
        if length == longest and total is not None:
            table = _last_row(total)
        if total is not None and (any(windows.values()) or not _is_by_key(seen, total, table)):
            raise r.unsupported(node, "adds a bias to its scores that is no mask and depends on more than the key")
    window = max(windows.values(), default=0)
    if any(found != (window if length > window else 0) for length, found in windows.items()):
        raise r.unsupported(node, f"has a window that depends on the length: {sorted(set(windows.values()))}")
    return Seen(window, table)


def _require_one_for_all(r: Raiser, mask: fx.Node) -> None:
    """Refuse a mask that differs between the sequences of a batch."""
    length = min(8, r.source.info.max_position)
    one, three = (Run(r, length, batch).value(mask) for batch in (1, 3))
    each = three.reshape(3 if three.numel() == 3 * one.numel() else 1, -1)
    if each.shape[1] != one.numel() or (each != one.reshape(1, -1)).any():
        raise r.unsupported(mask, "makes a mask that depends on the place in the batch")


def _visibility(mask: Tensor, meaning: str, factor: float) -> tuple[Tensor, Tensor | None]:
    """A boolean tensor, true where the mask shows a key, and the bias it adds to visible scores, or None if zero."""
    if mask.dtype == torch.bool:
        return (~mask if meaning == "hidden" else mask), None
    if meaning != "added":
        return (mask == 0 if meaning == "hidden" else mask != 0), None
    mask = mask.float() * factor
    shown = mask > HIDDEN
    return shown, mask if mask[shown].any() else None


def _last_row(bias: Tensor) -> Tensor:
    """The last query's row, which sees every key, of a bias [.., H or 1, Q or 1, S]: [H or 1, S]."""
    return bias[..., -1, :].reshape(-1, bias.shape[-1])


def _is_by_key(seen: Tensor, total: Tensor, table: Tensor | None) -> bool:
    """Whether a bias equals `table` at all visible keys, up to a constant per query.

    Softmax ignores that constant. The tolerance covers float32 rounding.
    """
    if table is None:
        return False
    size = total.shape[-1]
    wanted = table[:, :size]
    if total.shape[-2] == 1:  # the same for every query: one row suffices
        rows, shown = total.reshape(-1, 1, size), torch.ones(1, 1, size, dtype=torch.bool)
        own = rows[..., :1], wanted[:, None, :1]
    else:
        rows = total.expand(*total.shape[:-2], size, size).reshape(-1, size, size)
        shown = seen.expand(*seen.shape[:-2], size, size).reshape(-1, size, size)
        own = rows.diagonal(dim1=-2, dim2=-1)[..., None], wanted[..., None]
    error = ((rows - own[0]) - (wanted[:, None] - own[1])).masked_fill(~shown, 0.0).abs().max()
    most = float(wanted.abs().max())
    return len(rows) == len(wanted) and float(error) <= 4 * 2.0**-23 * most


def _window(r: Raiser, node: fx.Node, seen: Tensor, length: int) -> int:
    """The window of a mask broadcastable to [.., length, length]; 0 if it reaches back to the first token."""
    rows = seen.expand(*seen.shape[:-2], length, length).reshape(-1, length, length)
    width = int(rows[0, -1].sum())
    place = torch.arange(length)
    distance = place[:, None] - place[None]
    if not (rows == ((distance >= 0) & (distance < width))).all():
        raise r.unsupported(node, "has a mask that is neither causal nor a causal sliding window")
    return 0 if width == length else width


class Run:
    """Runs ATen nodes for `batch` sequences of `length` tokens at positions 0, 1, ...; token ids are not available."""

    def __init__(self, r: Raiser, length: int, batch: int = 1) -> None:
        self.r, self.found = r, {}  # type: tuple[Raiser, dict[fx.Node, Any]]
        self.counts = {size: {"B": batch, "T": length}[axis] for size, axis in r.axes.items()}
        self.length, self.batch = length, batch

    def value(self, node: fx.Node) -> Any:
        """The value of `node`."""
        if node not in self.found:
            self.found[node] = self._compute(node)
        return self.found[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return torch.arange(self.length).repeat(self.batch, 1)
        if node.op == "get_attr":
            return self.r.source.weights.mask(str(node.target))
        assert callable(node.target), node
        self.r.require_written(node)
        args, kwargs = node.args, node.kwargs
        if operator_name(node) in SHAPE_ONLY:
            source: Any = node.args[0]
            empty = torch.empty(self._shape(source), dtype=source.meta["val"].dtype)
            return node.target(empty, *fx.node.map_arg(args[1:], self.value), **fx.node.map_arg(kwargs, self.value))
        return run(node, self.value)

    def _shape(self, node: fx.Node) -> list[int]:
        sizes = node.meta["val"].shape
        return [size if isinstance(size, int) else int(size.node.expr.xreplace(self.counts)) for size in sizes]


def reads_ids(r: Raiser, item: Any) -> bool:
    """Whether the values (not just the shape) of the token ids reach `item`."""
    seen: set[fx.Node] = set()
    frontier = [item] if isinstance(item, fx.Node) else []
    while frontier:
        node = frontier.pop()
        if node is r.token_ids:
            return True
        if node not in seen:
            seen.add(node)
            frontier += node.all_input_nodes[1:] if operator_name(node) in SHAPE_ONLY else node.all_input_nodes
    return False


# ---- attention in elementary operators ---------------------------------------------------------------


def match_attention(r: Raiser, node: fx.Node) -> Known:
    """softmax(scores) @ v, where scores are q @ k^T scaled, soft-capped and masked in any order."""
    softmax, v = _unguarded(_unshaped(node.args[0])), r.value(node.args[1])
    if not is_call(softmax, "softmax", "_softmax") or v is None or v.base is None:
        return None
    if softmax.args[1] not in (-1, softmax.meta["val"].dim() - 1):
        return None
    scores = _Scores(r, strip(softmax.args[0]))
    if scores.inputs is None:
        return None
    q, k = scores.inputs
    flattened = v.dims[0] == "BF"
    inputs = [_with_heads(value) for value in (q, k, v)]
    outer = _heads(inputs)
    if outer is None:
        raise r.unsupported(node, "takes queries, keys or values that are not [batch, heads, tokens, features]")
    q, k, v = (_by_head(value, outer) for value in inputs)
    order = [
        values.permute(value, places) for value, places in ((q, (0, 2, 1, 3)), (k, (0, 3, 1, 2)), (v, (0, 2, 1, 3)))
    ]
    seen = prove_mask(r, node, scores.masks, is_causal=False)
    made = attention.build(r, node, order, scores.scale, seen.window, scores.softcap, None, seen.key_bias)
    made = values.permute(made, (0, 2, 1, 3))
    if flattened:
        return Value(made.base, ("BF", "T", "F"), made.terms)
    return Value(made.base, ("B", *("F" for _ in outer), "T", "F"), made.terms.reshape(-1, *outer, made.sizes[1]))


def _unshaped(item: Any) -> Any:
    """The node behind casts, copies and views."""
    while is_call(item := strip(item), "view", "reshape", "_unsafe_view"):
        item = item.args[0]
    return item


def _unguarded(item: Any) -> Any:
    """The softmax inside where(row is fully masked, 0, softmax); a causal mask has no such row."""
    if not is_call(item, "where") or not is_call(softmax := strip(item.args[2]), "softmax", "_softmax"):
        return item
    test, scores = item.args[0], strip(softmax.args[0])
    for name in ("logical_not", "any", "logical_not", "eq"):
        if not is_call(test, name):
            return item
        last, test = test, strip(test.args[0])
    return softmax if test is scores and last.args[1] == float("-inf") else item


def _with_heads(value: Value) -> Value:
    """A [B * H, ...] value as [B, H, ...]."""
    return Value(value.base, ("B", "F", *value.dims[1:]), value.terms) if value.dims[0] == "BF" else value


def _heads(inputs: Sequence[Value]) -> tuple[int, ...] | None:
    """Sizes of the head dimensions of queries, keys and values [B, .., *, *]: one, none, or groups and heads."""
    each = []
    for value in inputs:
        if len(value.dims) < 3 or value.dims[0] != "B" or not set(value.dims[1:-2]) <= {"", "F"}:
            return None
        sizes = iter(value.sizes)
        each.append(tuple(next(sizes) if dim else 1 for dim in value.dims[1:-2]))
    if len({len(sizes) for sizes in each}) > 1:
        return None
    return np.broadcast_shapes(*each)


def _by_head(value: Value, outer: tuple[int, ...]) -> Value:
    """A value [B, .., *, *] as [B, H, *, *]: its head dimensions expanded to `outer` and merged."""
    missing = [1 + place for place, dim in enumerate(value.dims[1:-2]) if not dim]
    terms = np.expand_dims(value.terms, missing)
    rest = terms.shape[1 + len(outer) :]
    terms = np.broadcast_to(terms, (len(terms), *outer, *rest))
    return Value(value.base, ("B", "F", *value.dims[-2:]), terms.reshape(len(terms), math.prod(outer), *rest))


class _Scores:
    """The operators between a softmax and its q @ k^T; `inputs` is None if one of them is unknown."""

    def __init__(self, r: Raiser, scores: Any) -> None:
        self.scale, self.softcap = 1.0, 0.0
        self.masks: list[Mask] = []
        self.inputs: tuple[Value, Value] | None = None
        while not is_call(scores, "matmul", "bmm", "mm", "baddbmm"):
            inner = self._step(r, scores)
            if inner is None:
                return
            scores = strip(inner)
        first, second = scores.args[:2]
        if is_call(scores, "baddbmm"):
            first, second = scores.args[1:3]
            if not self._added(r, scores):
                return
        q, k = r.value(first), r.value(second)
        if q is not None and k is not None and q.base is not None and k.base is not None:
            self.inputs = q, k

    def _added(self, r: Raiser, scores: Any) -> bool:
        """Record beta * bias + alpha * q @ k; False if it cannot be expressed, for instance under a soft cap."""
        beta, alpha = (r.number(scores.kwargs.get(name, 1)) for name in ("beta", "alpha"))
        if alpha is None or beta != 1 or self.softcap:
            return False
        self.masks.append((scores.args[0], "added", self.scale))
        self.scale *= alpha
        return True

    def _step(self, r: Raiser, scores: Any) -> Any:
        """Record the effect of the outermost operator on the scores and return its operand; None if unknown."""
        if is_call(scores, "view", "reshape", "_unsafe_view"):
            return scores.args[0]
        if self.softcap:  # a mask inside would be capped along with the scores
            return self._scaling(r, scores)
        if is_call(scores, "masked_fill"):
            hides = r.number(scores.args[2])
            self.masks.append((scores.args[1], "hidden", 1.0))
            return scores.args[0] if hides is not None and hides * self.scale <= HIDDEN else None
        if is_call(scores, "where"):
            hides = r.number(scores.args[2])
            self.masks.append((scores.args[0], "seen", 1.0))
            return scores.args[1] if hides is not None and hides * self.scale <= HIDDEN else None
        if is_call(scores, "max", "maximum"):
            least = r.number(scores.args[1]) if len(scores.args) == 2 else None
            return scores.args[0] if least is not None and least * self.scale <= HIDDEN else None
        if is_call(scores, "add"):
            for inner, mask in pair(scores):
                if reads_ids(r, inner) and isinstance(mask, fx.Node) and not reads_ids(r, mask):
                    self.masks.append((mask, "added", self.scale))
                    return inner
        return self._scaling(r, scores)

    def _scaling(self, r: Raiser, scores: Any) -> Any:
        if is_call(scores, "div"):
            number = r.number(scores.args[1])
            self.scale /= number or 1.0
            return scores.args[0] if number else None
        if not is_call(scores, "mul"):
            return None
        for inner, factor in pair(scores):
            number = r.number(factor)
            if number is None:
                continue
            if is_call(inner, "tanh") and not self.softcap and self.scale == 1:
                return self._capped(r, strip(inner.args[0]), number)
            self.scale *= number
            return inner
        return None

    def _capped(self, r: Raiser, inner: Any, cap: float) -> Any:
        """Record cap * tanh(scores / cap); returns the scores inside, of which further scaling is matched later.

        The operator's cap is positive: for a negative one, the scores are negated twice.
        """
        self.softcap = abs(cap)
        self.scale *= cap
        before = self.scale
        found = self._scaling(r, inner)
        return found if self.scale != before else None
