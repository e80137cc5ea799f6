"""Split: turn slices of one linear into separate linears, which later passes can scale, rotate and round separately.

Many checkpoints store query, key and value, or gate and up, as one matrix. Scaling keys or rotating values requires
rows that produce nothing else. `merge` rejoins equal precisions at the end, so kernels read as many weights as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.decisions import keep_precision

Range = tuple[int, int]


@dataclass(frozen=True)
class Split(Pass):
    """`(x W^T + b)[start:stop]` becomes `x W[start:stop]^T + b[start:stop]`, for linears read only through slices.

    Fires on linears with slices that do not overlap. Rows that no slice reads are dropped. `fired` counts linears.
    """

    name: ClassVar[str] = "split"
    requires: ClassVar[tuple[str, ...]] = ("raise",)

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        fired, notes = 0, []
        for node in graph.calls("linear"):
            slices = [user for user in node.users if ops.name_of(user.target) == "slice_features"]
            if not slices:
                continue
            reason = _refusal(node, slices)
            if reason is None:
                _split(graph, node, slices)
                fired += 1
            else:
                notes.append(f"node {node.name}: {reason}")
        graph.erase_dead()
        return PassResult(graph, fired, tuple(notes))


def _range(part: fx.Node) -> Range:
    return ops.operand(part, "start"), ops.operand(part, "stop")


def _refusal(node: fx.Node, slices: list[fx.Node]) -> str | None:
    """Why `node` cannot be split; None when its slices can become linears."""
    other = next((user for user in node.users if user not in slices), None)
    if other is not None:
        return f"{other.name} reads it whole, and {slices[0].name} a part of it"
    for (_, stop), (start, _) in pairwise(sorted({_range(part) for part in slices})):
        if start < stop:
            return f"parts of it that overlap at feature {start} are read"
    return None


def _split(graph: Graph, node: fx.Node, slices: list[fx.Node]) -> None:
    given = ops.operands(node)
    made: dict[Range, fx.Node] = {}
    for start, stop in sorted({_range(part) for part in slices}):
        weight = graph.call_weight("slice_rows", given.weight, start, stop)
        bias = None if given.bias is None else graph.call_weight("slice_rows", given.bias, start, stop)
        with graph.fx.inserting_before(node):
            made[start, stop] = graph.call("linear", given.x, weight, bias)
        keep_precision(node, made[start, stop])
    for part in slices:
        graph.replace(part, made[_range(part)])
