"""Masks proven causal by running them, and attention written out as matmul, softmax, matmul."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qcompile.passes import raise_attention as attention
from qcompile.passes import raise_values as values
from qcompile.passes.raise_ops import Known, Raiser, is_in_place, operator_name
from qcompile.passes.raise_patterns import is_call, pair, strip
from qcompile.passes.raise_values import Value

LENGTHS_TRIED = (1, 2, 3, 8, 17, 64, 257)
"""Sequence lengths at which a mask is run, besides the model's longest."""

LONGEST_MASK = 4096
"""A mask of more tokens would take too much memory to run."""

HIDDEN = -1e4
"""Scores below this are hidden: what models add to them ranges from -10,000 to minus infinity."""

SHAPE_ONLY = {"sym_size", "ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full"}
"""Operators that read the shape of their first operand and not its values."""

Mask = tuple[fx.Node, str]
"""A mask and what it says: `seen` or `hidden` (booleans), or `added` to the scores."""


def prove_mask(r: Raiser, node: fx.Node, masks: Sequence[Mask], is_causal: bool) -> int:
    """The window (0: none) of the causal mask that `masks` make together; they are run at several lengths.

    Raises UnsupportedError, naming `node`, when together they are anything else.
    """
    key = (*masks, is_causal)
    if key not in r.proven:
        r.proven[key] = _prove(r, node, masks, is_causal)
    return r.proven[key]


def _prove(r: Raiser, node: fx.Node, masks: Sequence[Mask], is_causal: bool) -> int:
    for mask, _ in masks:
        if reads_ids(r, mask):
            raise r.unsupported(mask, "makes a mask from token ids; only masks of positions are compiled")
    if not masks and not is_causal:
        raise r.unsupported(node, "attends to later tokens; only causal decoders are compiled")
    windows = set()
    longest = r.source.info.max_position
    if masks and longest > LONGEST_MASK:
        raise r.unsupported(
            node, f"has an explicit mask of {longest} positions; beyond {LONGEST_MASK} use is_causal=True"
        )
    for length in sorted({min(length, longest) for length in (*LENGTHS_TRIED, longest)}) if masks else ():
        seen = torch.ones(length, length, dtype=torch.bool).tril() if is_causal else torch.ones(1, 1, dtype=torch.bool)
        for mask, meaning in masks:
            seen = seen & _seen(r, node, _Run(r, length).value(mask), meaning)
        windows.add(_window(r, node, seen, length))
    cut = {w for w in windows if w}
    if len(cut) > 1:
        raise r.unsupported(node, f"has a window that depends on the length: {sorted(cut)}")
    return cut.pop() if cut else 0


def _seen(r: Raiser, node: fx.Node, mask: Tensor, meaning: str) -> Tensor:
    """Booleans, true where the mask lets a key be seen."""
    if mask.dtype == torch.bool:
        return ~mask if meaning == "hidden" else mask
    if meaning != "added":
        return mask == 0 if meaning == "hidden" else mask != 0
    if not ((mask == 0) | (mask <= HIDDEN)).all():
        raise r.unsupported(node, "adds a bias to its scores that is not a mask")
    return mask == 0


def _window(r: Raiser, node: fx.Node, seen: Tensor, length: int) -> int:
    """The window of a mask broadcastable to [.., length, length], 0 when it reaches the first token."""
    rows = seen.expand(*seen.shape[:-2], length, length).reshape(-1, length, length)
    width = int(rows[0, -1].sum())
    place = torch.arange(length)
    distance = place[:, None] - place[None]
    if not (rows == ((distance >= 0) & (distance < width))).all():
        raise r.unsupported(node, "has a mask that is neither causal nor a causal sliding window")
    return 0 if width == length else width


class _Run:
    """ATen nodes run for one sequence of `length` tokens at positions 0, 1, ..., its ids unknown."""

    def __init__(self, r: Raiser, length: int) -> None:
        self.r, self.found = r, {}  # type: tuple[Raiser, dict[fx.Node, Any]]
        self.counts = {size: {"B": 1, "T": length}[axis] for size, axis in r.axes.items()}
        self.length = length

    def value(self, node: fx.Node) -> Any:
        """The value of `node`."""
        if node not in self.found:
            self.found[node] = self._compute(node)
        return self.found[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return torch.arange(self.length)[None]
        if node.op == "get_attr":
            return self.r.evaluate(node)
        assert callable(node.target), node
        args, kwargs = node.args, node.kwargs
        if operator_name(node) in SHAPE_ONLY:
            source: Any = node.args[0]
            empty = torch.empty(self._shape(source), dtype=source.meta["val"].dtype)
            return node.target(empty, *fx.node.map_arg(args[1:], self.value), **fx.node.map_arg(kwargs, self.value))
        values: list[Any] = list(fx.node.map_arg(args, self.value))
        if is_in_place(node):  # what it overwrites may be wanted by nodes before it
            values[0] = values[0].clone()
        return node.target(*values, **fx.node.map_arg(kwargs, self.value))

    def _shape(self, node: fx.Node) -> list[int]:
        sizes = node.meta["val"].shape
        return [size if isinstance(size, int) else int(size.node.expr.xreplace(self.counts)) for size in sizes]


def reads_ids(r: Raiser, item: Any) -> bool:
    """Whether the values of the token ids reach `item`; their shape may."""
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


# ---- written out -------------------------------------------------------------------------------------


def match_attention(r: Raiser, node: fx.Node) -> Known:
    """softmax(scores) @ v for scores made of q @ k^T by scaling, soft-capping and masking in any order."""
    softmax, v = _safe(_unshaped(node.args[0])), r.value(node.args[1])
    if not is_call(softmax, "softmax", "_softmax") or v is None or v.base is None:
        return None
    if softmax.args[1] not in (-1, softmax.meta["val"].dim() - 1):
        return None
    scores = _Scores(r, strip(softmax.args[0]))
    if scores.inputs is None:
        return None
    q, k = scores.inputs
    flattened = len(v.dims) == 3
    q, k, v = (_four(value) for value in (q, k, v))
    order = [
        values.permute(value, places) for value, places in ((q, (0, 2, 1, 3)), (k, (0, 3, 1, 2)), (v, (0, 2, 1, 3)))
    ]
    window = prove_mask(r, node, scores.masks, is_causal=False)
    made = attention.build(r, node, order, scores.scale, window, scores.softcap, None)
    made = values.permute(made, (0, 2, 1, 3))
    return Value(made.base, ("BF", "T", "F"), made.terms) if flattened else made


def _unshaped(item: Any) -> Any:
    """The node behind casts, copies and views."""
    while is_call(item := strip(item), "view", "reshape", "_unsafe_view"):
        item = item.args[0]
    return item


def _safe(item: Any) -> Any:
    """The softmax of where(row has nothing to see, 0, softmax): a causal mask has no such row."""
    if not is_call(item, "where") or not is_call(softmax := strip(item.args[2]), "softmax", "_softmax"):
        return item
    test, scores = item.args[0], strip(softmax.args[0])
    for name in ("logical_not", "any", "logical_not", "eq"):
        if not is_call(test, name):
            return item
        last, test = test, strip(test.args[0])
    return softmax if test is scores and last.args[1] == float("-inf") else item


def _four(value: Value) -> Value:
    """A [B * H, ...] value as [B, H, ...]."""
    return Value(value.base, ("B", "F", *value.dims[1:]), value.terms) if value.dims[0] == "BF" else value


class _Scores:
    """What lies between a softmax and the q @ k^T it is of; `inputs` is None when there is something else."""

    def __init__(self, r: Raiser, scores: Any) -> None:
        self.scale, self.softcap = 1.0, 0.0
        self.masks: list[Mask] = []
        self.inputs: tuple[Value, Value] | None = None
        while not is_call(scores, "matmul", "bmm", "mm"):
            inner = self._step(r, scores)
            if inner is None:
                return
            scores = strip(inner)
        q, k = r.value(scores.args[0]), r.value(scores.args[1])
        if q is not None and k is not None and q.base is not None and k.base is not None:
            self.inputs = q, k

    def _step(self, r: Raiser, scores: Any) -> Any:
        """Note what the outermost operator on the scores does and give what it does it to; None if unknown."""
        if is_call(scores, "view", "reshape", "_unsafe_view"):
            return scores.args[0]
        if self.softcap or self.scale != 1:  # a mask in here would be scaled and capped with the scores
            return self._scaling(r, scores)
        if is_call(scores, "masked_fill"):
            hides = r.number(scores.args[2])
            self.masks.append((scores.args[1], "hidden"))
            return scores.args[0] if hides is not None and hides <= HIDDEN else None
        if is_call(scores, "where"):
            hides = r.number(scores.args[2])
            self.masks.append((scores.args[0], "seen"))
            return scores.args[1] if hides is not None and hides <= HIDDEN else None
        if is_call(scores, "add"):
            for inner, mask in pair(scores):
                if reads_ids(r, inner) and isinstance(mask, fx.Node) and not reads_ids(r, mask):
                    self.masks.append((mask, "added"))
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
        """The scores of cap * tanh(scores / cap); a scale inside is left to be met."""
        self.softcap = cap
        self.scale *= cap
        before = self.scale
        found = self._scaling(r, inner)
        return found if self.scale != before else None
