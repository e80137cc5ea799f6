"""Join linears that read the same value, so that one kernel streams their weights together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from torch import fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult


@dataclass(frozen=True)
class Merge(Pass):
    """`act(x Wg) * (x Wu)` becomes one gated linear, also for experts; other linears of one input become one, sliced.

    Weights are joined along output rows, and every format rounds output rows independently, so results do not change.
    Only linears of equal precision are joined; if some have a bias, the others get zeros.
    """

    name: ClassVar[str] = "merge"
    requires: ClassVar[tuple[str, ...]] = ("raise",)

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        fired = sum(_merge_gate(graph, node) for node in graph.calls("mul"))
        fired += sum(_merge_gate(graph, node, experts=True) for node in graph.calls("mul"))
        seen: set[fx.Node] = set()
        for node in graph.calls("linear"):
            if node not in seen:
                siblings = _siblings(graph, node)
                seen.update(siblings)
                if len(siblings) > 1:
                    _merge_siblings(graph, siblings)
                    fired += 1
        graph.erase_dead()
        return PassResult(graph, fired)


@dataclass(frozen=True)
class _Gating:
    """kind(gate) * up: both linears, the nodes between them and the product, and the clamp limit and offset."""

    gate: fx.Node
    up: fx.Node
    kind: str
    between: list[fx.Node]
    limit: float | None = None
    offset: float = 0.0


def _gating(node: fx.Node, linear: str) -> _Gating | None:
    """Match mul(unary(gate), up) over linears named `linear`, in either order; experts may be clamped and shifted."""
    a, b = ops.operand(node, "a"), ops.operand(node, "b")
    for first, up in ((a, b), (b, a)):
        if not (isinstance(first, fx.Node) and isinstance(up, fx.Node)) or ops.name_of(first.target) != "unary":
            continue
        gate, kind = ops.operand(first, "x"), ops.operand(first, "kind")
        gating = _limited(first, gate, up, kind) if linear == "expert_linear" else None
        gating = gating or _Gating(gate, up, kind, [first])
        if ops.name_of(gating.gate.target) == ops.name_of(gating.up.target) == linear:
            return gating
    return None


def _limited(act: fx.Node, gate: fx.Node, up: fx.Node, kind: str) -> _Gating | None:
    """Match clamps of gate and up, and a shift of up; None where the limits are not one number."""
    between, offset = [act], 0.0
    if ops.name_of(up.target) == "shift":
        between.append(up)
        up, offset = ops.operand(up, "x"), ops.operand(up, "offset")
    clamped = [n for n in (gate, up) if ops.name_of(n.target) == "clamp"]
    if not clamped:
        return _Gating(gate, up, kind, between, None, offset)
    if len(clamped) < 2:
        return None
    above, both = ops.operands(gate), ops.operands(up)
    limit = above.high
    if limit is None or limit < 0 or above.low is not None or (both.low, both.high) != (-limit, limit):
        return None
    return _Gating(above.x, both.x, kind, between + clamped, limit, offset)


def _merge_gate(graph: Graph, node: fx.Node, experts: bool = False) -> bool:
    gating = _gating(node, "expert_linear" if experts else "linear")
    if gating is None:
        return False
    gate, up = gating.gate, gating.up
    alone = all(len(n.users) == 1 for n in (*gating.between, gate, up))
    if not alone or gate is up or gate.meta["val"].shape != up.meta["val"].shape or not _joinable(gate, up):
        return False
    with graph.fx.inserting_before(node):
        joined = _gated_experts(graph, gating) if experts else _gated_linear(graph, gate, up, gating.kind)
    if joined is None:
        return False
    joined.meta["precision"] = gate.meta["precision"]
    graph.replace(node, joined)
    for dead in (*gating.between, gate, up):
        graph.fx.erase_node(dead)
    return True


def _gated_linear(graph: Graph, gate: fx.Node, up: fx.Node, kind: str) -> fx.Node:
    weight = graph.call_weight("interleave_rows", _weight(gate), _weight(up), ops.GATE_BLOCK)
    bias = None
    if _bias(gate) is not None or _bias(up) is not None:
        bias = graph.call_weight("interleave_rows", *_biases(graph, [gate, up]), ops.GATE_BLOCK)
    x, width = ops.operand(gate, "x"), gate.meta["val"].shape[-1]
    return graph.call("gated_linear", x, weight, bias=bias, kind=kind, width=width)


def _gated_experts(graph: Graph, gating: _Gating) -> fx.Node | None:
    """None if gate and up use different expert choices, or only one of them has biases."""
    gate, up = ops.operands(gating.gate), ops.operands(gating.up)
    if gate.index is not up.index or (gate.bias is None) != (up.bias is None):
        return None
    weight = graph.call_weight("interleave_experts", gate.weight, up.weight, ops.GATE_BLOCK)
    bias = None
    if gate.bias is not None:
        bias = graph.call_weight("interleave_experts", gate.bias, up.bias, ops.GATE_BLOCK)
    return graph.call(
        "gated_experts",
        gate.x,
        gate.index,
        weight,
        bias=bias,
        kind=gating.kind,
        width=gating.gate.meta["val"].shape[-1],
        limit=gating.limit,
        offset=gating.offset,
    )


def _weight(linear: fx.Node) -> fx.Node:
    weight: fx.Node = ops.operand(linear, "weight")
    return weight


def _bias(linear: fx.Node) -> fx.Node | None:
    bias: fx.Node | None = ops.operand(linear, "bias")
    return bias


def _joinable(a: fx.Node, b: fx.Node) -> bool:
    return ops.operand(a, "x") is ops.operand(b, "x") and a.meta["precision"] == b.meta["precision"]


def _biases(graph: Graph, linears: list[fx.Node]) -> list[object]:
    """The linears' biases; zeros for those without."""
    return [graph.call_weight("zero_bias", _weight(n)) if _bias(n) is None else _bias(n) for n in linears]


def _reads_whole(graph: Graph, user: fx.Node) -> bool:
    """Whether `user` is a linear, or the sum of two values, which may become a part of a linear."""
    kind = ops.name_of(user.target)
    return kind in ("linear", "expert_linear") or (kind == "add" and not any(map(graph.is_weight, user.args)))


def _siblings(graph: Graph, node: fx.Node) -> list[fx.Node]:
    """The linears that can join `node`, including itself, in graph order.

    One that other linears read, or to which others are added, stays alone unless it is the first: as inputs and
    residuals of linears, kernels read values from column 0 only.
    """
    source: fx.Node = ops.operand(node, "x")
    joinable = [user for user in source.users if ops.name_of(user.target) == "linear" and _joinable(node, user)]
    first, *others = sorted(joinable, key=lambda n: n._sort_key)
    alone = [n for n in others if any(_reads_whole(graph, user) for user in n.users)]
    return [node] if node in alone else [first, *(n for n in others if n not in alone)]


def _stacked(graph: Graph, weights: list[Any]) -> fx.Node:
    """The weights concatenated by rows, or the weight they were split from (passes/split.py) if they are unchanged."""
    whole: Any = ops.operand(weights[0], "w") if ops.name_of(weights[0].target) == "slice_rows" else None
    place = 0
    for weight in weights:
        if ops.name_of(weight.target) != "slice_rows":
            return graph.call_weight("concat_rows", weights)
        part = ops.operands(weight)
        if part.w is not whole or part.start != place:
            return graph.call_weight("concat_rows", weights)
        place = part.stop
    return whole if whole.meta["val"].shape[0] == place else graph.call_weight("concat_rows", weights)


def _merge_siblings(graph: Graph, linears: list[fx.Node]) -> None:
    first = linears[0]
    weight = _stacked(graph, [_weight(n) for n in linears])
    bias = None
    if any(_bias(n) is not None for n in linears):
        bias = _stacked(graph, _biases(graph, linears))
    with graph.fx.inserting_before(first):
        joined = graph.call("linear", ops.operand(first, "x"), weight, bias)
        stops = list(accumulate(n.meta["val"].shape[-1] for n in linears))
        slices = [graph.call("slice_features", joined, *pair) for pair in pairwise((0, *stops))]
    joined.meta["precision"] = first.meta["precision"]
    for linear, part, start in zip(linears, slices, (0, *stops), strict=False):
        for user in graph.calls("slice_features"):
            if ops.operand(user, "x") is linear:  # a slice of a slice becomes a slice of the whole
                part_of = ops.operands(user)
                ops.set_operands(user, x=joined, start=start + part_of.start, stop=start + part_of.stop)
        graph.replace(linear, part)
