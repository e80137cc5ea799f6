"""Move a diagonal scale of a value's channels into the operators that produce the value.

`_PUSH` says how a scale passes each operator; its keys are operators, not models. If a producer cannot absorb the
scale, the push is refused with that node's name before anything is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.graph import Graph
from qcompile.passes import dataflow


def not_linears_alone(graph: Graph, node: fx.Node) -> str | None:
    """Why a rescaling at `node` cannot move into the weights of the linears that read it; None when it can."""
    if not node.users:
        return "nothing reads it"
    for user in node.users:
        if ops.name_of(user.target) not in ("linear", "expert_linear") or ops.operand(user, "x") is not node:
            return f"read by {user.name}, which is not a linear over it"
        if not graph.is_weight(ops.operand(user, "weight")):
            return f"read by {user.name}, which multiplies it by another value, not by a weight"
    return None


class ScalePusher:
    """Multiplies (with `inverse`: divides) the channels of values by a weight vector, inside their producers.

    The vector is [F] for a value [..., F], and [H * D] or [D] (shared by all heads) for a value [..., H, D]. `paired`
    promises equal factors within each rotary pair, so that the scale commutes with RoPE. `fired` counts changed
    weights.
    """

    def __init__(self, graph: Graph, pass_name: str, *, paired: bool = False) -> None:
        self.graph, self.pass_name, self.paired = graph, pass_name, paired
        self.fired = 0

    def push(self, value: fx.Node, user: fx.Node, factor: fx.Node, inverse: bool) -> None:
        """Scale `value`; `user` must be its only user. If impossible, raises PassError and changes nothing."""
        self._check(value, user, int(factor.meta["val"].shape[0]))
        self._apply(value, factor, inverse)

    def can_push(self, value: fx.Node, user: fx.Node, size: int) -> str | None:
        """Why `push` of a vector of `size` would refuse, or None."""
        try:
            self._check(value, user, size)
        except PassError as error:
            return str(error)
        return None

    def _check(self, node: Any, user: fx.Node, size: int) -> None:
        if set(node.users) != {user} or not dataflow.read_once(node):
            raise PassError(self.pass_name, node.name, "others read this value too, so its channels cannot be scaled")
        kind = ops.name_of(node.target) or str(node.op)
        if kind == "rope" and not self.paired:
            raise PassError(self.pass_name, node.name, "a scale passes a rotation only where it is equal in each pair")
        if kind not in _PUSH:
            raise PassError(self.pass_name, node.name, f"a channel scale cannot move into {kind}")
        if kind == "mul" and not _is_by_row(node) and _shape(ops.operand(node, "b")) != _shape(node):
            raise PassError(self.pass_name, node.name, "its second factor is the same for several of its channels")
        if kind == "rotate_heads" and ops.operand(node, "block"):
            raise PassError(self.pass_name, node.name, "a scale does not pass a matrix that mixes channels")
        if kind in ("rms_norm", "layer_norm") and ops.operand(node, "weight") is None:
            raise PassError(self.pass_name, node.name, "this norm has no weight that could take a scale")
        for name in _PUSH[kind].weights:
            weight = ops.operand(node, name)
            if weight is not None and _shape(weight)[0] % size:
                raise PassError(self.pass_name, node.name, "one of its weights serves channels with different scales")
        for source in self._sources(node, kind):
            self._check(source, node, size)

    def _sources(self, node: Any, kind: str) -> list[fx.Node]:
        """The producers that the scale moves on to; empty if it ends in this node's weights."""
        if kind == "mul" and _is_by_row(node):
            return [ops.operand(node, "a")]
        passes_to = _PUSH[kind].passes_to
        return [] if passes_to is None else [ops.operand(node, passes_to)]

    def _apply(self, node: Any, factor: fx.Node, inverse: bool) -> None:
        rule = _PUSH[ops.name_of(node.target) or ""]
        for name in rule.weights:
            self.fired += dataflow.rewrite_weight(
                self.graph, node, name, "scale_axis", factor=factor, axis=0, inverse=inverse
            )
        for source in self._sources(node, ops.name_of(node.target) or ""):
            self._apply(source, factor, inverse)


def _is_by_row(product: Any) -> bool:
    """Whether the second factor is one number per row, such as a factor of the position: then the first is scaled."""
    return _shape(ops.operand(product, "b")) == (*_shape(product)[:-1], 1)


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


@dataclass(frozen=True)
class _Rule:
    """How a scale passes an operator: operands `weights` absorb it on their first axis, `passes_to` passes it on."""

    weights: tuple[str, ...] = ()
    passes_to: str | None = None


_PUSH: dict[str, _Rule] = {
    "linear": _Rule(weights=("weight", "bias")),
    "rms_norm": _Rule(weights=("weight",)),
    "layer_norm": _Rule(weights=("weight", "bias")),
    "mul": _Rule(passes_to="b"),  # act(gate) * up: only `up` is linear in its weights
    "rope": _Rule(passes_to="x"),
    "rotate_heads": _Rule(weights=("center",), passes_to="x"),
    "split_heads": _Rule(passes_to="x"),
    "merge_heads": _Rule(passes_to="x"),
}
