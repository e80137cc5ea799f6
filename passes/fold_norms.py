"""Fold norms: move the scale, bias and mean-centering of norms into the linears around them.

LayerNorm is RMSNorm of a centered value. Centering is linear, so the writers of the residual stream can do it
(SliceGPT, Ashkboos et al. 2024, section 3.1). Models with LayerNorm can then be rotated like those with RMSNorm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.passes import dataflow
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.channels import not_linears_alone


@dataclass(frozen=True)
class FoldNorms(Pass):
    """`W (n * w + b) + c` becomes `(W * w) n + (W b + c)`, which leaves the norm without scale and bias.

    Fires on a norm if all its users are linears that read it as their input. The fold is written as operators on the
    linear's weight, so a weight with other users (a tied embedding) keeps its values for them.

    If all users of a residual stream are then layer_norms without parameters, and all its writers are linears or
    embeddings, the writers' weights are centered and the norms become rms_norms. Each such norm counts as fired too.

    Rotation requires the fold; plain rounding is better without it, because a scale per input channel widens the range
    of the inputs that share a group (W4 g128 on the sample model: perplexity 5.572 folded, 5.531 unfolded). With
    `needed`, only the norms of residual streams that can be rotated offline once all norms are folded are folded; the
    others are listed in the notes.
    """

    name: ClassVar[str] = "fold_norms"
    requires: ClassVar[tuple[str, ...]] = ("raise",)
    enabled: bool = False
    needed: bool = False

    def run(self, graph: Graph) -> PassResult:
        if not self.needed:
            return self._fold(graph, None)
        folded = self._fold(graph, None).graph
        streams = dataflow.residual_streams(folded)
        rotatable = [stream for stream in streams if dataflow.rotation_obstacle(folded, stream) is None]
        return self._fold(graph, {value.name for stream in rotatable for value in stream.values})

    def _fold(self, graph: Graph, needed: set[str] | None) -> PassResult:
        """A copy with its norms folded: those that read a value named in `needed`, or all if `needed` is None."""
        graph = graph.clone()
        fired, notes = 0, []
        for node in graph.calls(*ops.NORMS):
            scale, shift = _parameters(node)
            if scale is None and shift is None:
                continue
            reason = not_linears_alone(graph, node)
            if reason is None and needed is not None and str(ops.operand(node, "x")) not in needed:
                reason = "no residual stream can be rotated for it, so it keeps its scale and bias"
            if reason is None:
                _fold(graph, node, scale, shift)
                fired += 1
            else:
                notes.append(f"node {node.name}: {reason}")
        for stream in dataflow.residual_streams(graph):
            norms = [user for user, _ in stream.reads if ops.name_of(user.target) == "layer_norm"]
            reason = _centering_refusal(graph, stream) if norms else None
            if norms and reason is None:
                _center(graph, stream, norms)
                fired += len(norms)
            elif reason is not None:
                notes.append(reason)
        graph.erase_dead()
        return PassResult(graph, fired, tuple(notes))


def _parameters(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """(scale, bias) of a norm; None for each that it lacks."""
    scale = ops.operand(node, "weight")
    shift = ops.operand(node, "bias") if ops.has_operand(node, "bias") else None
    assert scale is None or isinstance(scale, fx.Node)
    assert shift is None or isinstance(shift, fx.Node)
    return scale, shift


def _fold(graph: Graph, node: fx.Node, scale: fx.Node | None, shift: fx.Node | None) -> None:
    for linear in list(node.users):
        weight, bias = ops.operand(linear, "weight"), ops.operand(linear, "bias")
        if shift is not None:
            moved = graph.call_weight("matvec", weight, shift)
            bias = moved if bias is None else graph.call_weight("add", moved, bias)
        if scale is not None:
            weight = graph.call_weight("mul", weight, scale)
        ops.set_operands(linear, weight=weight, **({} if bias is None else {"bias": bias}))
    ops.set_operands(node, weight=None, **({"bias": None} if ops.has_operand(node, "bias") else {}))


def _centering_refusal(graph: Graph, stream: dataflow.Stream) -> str | None:
    """Why the writers of `stream` cannot remove its mean; None when they can."""
    for user, value in stream.reads:
        if ops.name_of(user.target) != "layer_norm" or ops.operand(user, "x") is not value:
            return f"node {user.name}: reads the residual stream with its mean, which layer_norms take out"
        if any(parameter is not None for parameter in _parameters(user)):
            return f"node {user.name}: keeps its scale or bias, so its centering cannot move to the stream's writers"
    for writer in stream.writers:
        if ops.name_of(dataflow.weighted(graph, writer).target) not in dataflow.WEIGHT_AXES:
            return f"node {writer.name}: writes the residual stream and has no weight that could be centered"
    return None


def _center(graph: Graph, stream: dataflow.Stream, norms: list[fx.Node]) -> None:
    """Center the output of every writer of `stream` and every constant added to it; its norms become rms_norms."""
    for writer in (dataflow.weighted(graph, writer) for writer in stream.writers):
        for name in ("weight", "bias"):
            dataflow.rewrite_weight(graph, writer, name, "center", axis=dataflow.axes_of(writer).outputs)
    for node in stream.values:
        for name, operand in ops.named(node).items() if node not in stream.writers else ():
            if isinstance(operand, fx.Node) and graph.is_weight(operand):
                dataflow.rewrite_weight(graph, node, name, "center", axis=0)
    for norm in norms:
        with graph.fx.inserting_before(norm):
            plain = graph.call("rms_norm", ops.operand(norm, "x"), weight=None, eps=ops.operand(norm, "eps"))
        graph.replace(norm, plain)
