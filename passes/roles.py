"""What each linear of a raised graph is for, and in which layer, found from dataflow alone.

A layer is a mixer (attention, a recurrence, or a convolution that feeds none) with the linears around it. Mixers of
which none depends on another are of one layer. Roles are those of qcompile/recipe_files/rules.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.passes.adapted_linears import CHOICES
from qcompile.passes.assign_precision import head_linears, router_linears
from qcompile.passes.dataflow import WEIGHT_AXES, Stream, residual_streams, weighted

LINEARS = ("linear", "expert_linear")
MIXERS = ("attention", "linear_recurrence")
ACTIVATIONS = ("unary", "xielu", "power")
_OPERANDS = {"q": "query", "k": "key", "v": "value"}
"""Roles of linears by the operand of attention that they make."""


@dataclass(frozen=True)
class LinearSite:
    """A linear with its roles, the number of its layer, and the names of its weights."""

    node: fx.Node
    roles: tuple[str, ...]
    layer: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"node {self.node.name} (layer {self.layer}, {', '.join(self.roles)}; {', '.join(self.names)})"


def sites(graph: Graph) -> tuple[list[LinearSite], int]:
    """The linears of `graph` in graph order, those excepted that choose experts, and the number of layers."""
    layers, routers = _Layers(graph), router_linears(graph)
    roles = _Roles(layers).of_linears()
    linears = [node for node in graph.calls(*LINEARS) if node not in routers]
    listed = [
        LinearSite(node, tuple(roles.get(node, ("other",))), layers.of(node), weight_names(graph, node))
        for node in linears
    ]
    return listed, layers.count


def weight_names(graph: Graph, node: fx.Node) -> tuple[str, ...]:
    """Names of the matrices that the weight of a linear is computed from, as the checkpoint has them."""
    names: dict[str, None] = {}
    left = [ops.operand(node, "weight")]
    seen = set(left)
    while left:
        source = left.pop()
        if source.op == "get_attr":
            if len(graph.weights.entries[str(source.target)].shape) > 1:
                names[_stored(graph, str(source.target))] = None
        elif ops.name_of(source.target) not in CHOICES:
            fresh = [each for each in reversed(source.all_input_nodes) if each not in seen]
            left += fresh
            seen.update(fresh)
    return tuple(names)


def _stored(graph: Graph, name: str) -> str:
    """The name in the checkpoint of the weight `name`: raising adds `.T`, `.rows0` and the like to what it derives."""
    parts = name.split(".")
    longer = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((each for each in longer if each in graph.weights), name)


class _Layers:
    """The mixers of a graph, and the layer of each linear."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        streams = [stream for stream in residual_streams(graph) if _is_residual(graph, stream)]
        self.stream = {value for stream in streams for value in stream.values}
        self.live = _live(graph)

    def of(self, node: fx.Node) -> int:
        """The layer of a linear.

        What comes after n mixers is of layer n - 1, unless it feeds mixer n without a way over the residual stream, or
        stands beside mixer n, so that nothing of it reaches mixer n.
        """
        after = self._depth[node]
        beside = after < self.count and self._next[node] > after
        return max(after - 1 + (node in self.inputs or beside), 0)

    @property
    def count(self) -> int:
        """The number of layers."""
        return max(self._depth.values(), default=0)

    def before(self, values: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, bool]]:
        """The linears, mixers and values of the residual stream nearest to `values` on the way back, themselves
        included; each with whether an activation comes after it."""
        seen: set[tuple[fx.Node, bool]] = set()
        left = [(value, False) for value in values]
        while left:
            node, activated = step = left.pop()
            if step in seen or node not in self.live:
                continue
            seen.add(step)
            if node in self.stream or ops.name_of(node.target) in LINEARS or node in self.mixers:
                yield step
            else:
                now = activated or ops.name_of(node.target) in ACTIVATIONS
                left += [(source, now) for source in node.all_input_nodes]

    def linears_before(self, values: Iterable[fx.Node]) -> list[fx.Node]:
        """Only the linears of `before`."""
        return [node for node, _ in self.before(values) if ops.name_of(node.target) in LINEARS]

    def linears_after(self, mixer: fx.Node) -> Iterator[fx.Node]:
        """The linears nearest to a mixer on the way onward, up to the residual stream."""
        left, seen = list(mixer.users), set(mixer.users)
        while left:
            node = left.pop()
            if ops.name_of(node.target) in LINEARS:
                yield node
            elif node not in self.stream and node not in self.mixers:
                fresh = [user for user in node.users if user not in seen]
                left += fresh
                seen.update(fresh)

    @cached_property
    def mixers(self) -> set[fx.Node]:
        """The mixers of all layers."""
        strong = set(self.graph.calls(*MIXERS))
        feeding = self._cone(strong)
        return strong | {node for node in self.graph.calls("causal_conv") if node not in feeding}

    @cached_property
    def inputs(self) -> set[fx.Node]:
        """Linears between the residual stream and a mixer."""
        return {node for node in self._cone(self.mixers) if ops.name_of(node.target) in LINEARS}

    def _cone(self, mixers: set[fx.Node]) -> set[fx.Node]:
        """What leads to `mixers` from the residual stream, or from other mixers."""
        cone: set[fx.Node] = set()
        left = [source for mixer in mixers for source in mixer.all_input_nodes]
        while left:
            node = left.pop()
            if node not in cone and node in self.live and node not in self.stream and node not in mixers:
                cone.add(node)
                left += node.all_input_nodes
        return cone

    @cached_property
    def _depth(self) -> dict[fx.Node, int]:
        """The number of mixers on the longest way to a node, itself included."""
        depth: dict[fx.Node, int] = {}
        for node in self.graph.fx.nodes:
            depth[node] = max((depth[source] for source in node.all_input_nodes), default=0) + (node in self.mixers)
        return depth

    @cached_property
    def _next(self) -> dict[fx.Node, int]:
        """The layer of the first mixer that depends on a node; the number of layers if there is none."""
        first: dict[fx.Node, int] = {}
        for node in reversed(self.graph.nodes):
            own = [self._depth[user] - 1 for user in node.users if user in self.mixers]
            first[node] = min((*own, *(first[user] for user in node.users)), default=self.count)
        return first


class _Roles:
    """The roles of the linears of a graph."""

    def __init__(self, layers: _Layers) -> None:
        self.layers, self.graph = layers, layers.graph
        self._roles: dict[fx.Node, list[str]] = {}

    def of_linears(self) -> dict[fx.Node, list[str]]:
        """The roles of each linear that has any."""
        self._add(sorted(head_linears(self.graph)), "head")
        self._attention()
        for node in self.graph.calls(*LINEARS):
            if node not in self._roles:
                self._feed_forward(node)
        return self._roles

    def _add(self, nodes: Iterable[fx.Node], role: str) -> None:
        for node in nodes:
            roles = self._roles.setdefault(node, [])
            if role not in roles and not (role == "attention_inner" and roles):
                roles.append(role)

    def _attention(self) -> None:
        """The linears between the residual stream and mixers, and those behind mixers."""
        for node in self.graph.calls("attention"):
            for operand, role in _OPERANDS.items():
                self._add(self.layers.linears_before([ops.operand(node, operand)]), role)
        for mixer in sorted(self.layers.mixers):
            if ops.name_of(mixer.target) != "attention":
                self._add(self.layers.linears_before(mixer.all_input_nodes), "state")
        for mixer in sorted(self.layers.mixers):
            for node in self.layers.linears_after(mixer):
                inner = node in self._roles or node in self.layers.inputs
                for last in self._absorbing(node) if not inner else ():
                    self._add([last], "output")
                    self._add(self.layers.linears_before([ops.operand(last, "x")]), "attention_inner")
        self._add(sorted(self.layers.inputs), "attention_inner")

    def _absorbing(self, node: fx.Node) -> list[fx.Node]:
        """The linear `node` behind an attention; or, if it makes values of a cached latent, what reads these."""
        index = ops.operand(node, "index") if ops.name_of(node.target) == "expert_linear" else None
        if index is None or ops.name_of(index.target) != "every_expert":
            return [node]
        self._add([node], "value")
        return list(self.layers.linears_after(node))

    def _feed_forward(self, down: fx.Node) -> None:
        """Roles of `down` and of the linears before it, if it reads activated results of linears and nothing else."""
        before = list(self.layers.before([ops.operand(down, "x")]))
        like = ops.name_of(down.target)
        if not any(activated for _, activated in before) or any(ops.name_of(n.target) != like for n, _ in before):
            return
        kind = "expert_" if like == "expert_linear" else ""
        plain = {node for node, activated in before if not activated}
        self._add([down], f"{kind}down")
        for node, _ in before:
            gates = plain and node not in plain
            self._add([node], f"{kind}gate" if gates else f"{kind}up")


def _is_residual(graph: Graph, stream: Stream) -> bool:
    """Whether blocks write `stream`, by linears; sums within a block have no linear or embedding among their terms."""
    return any(ops.name_of(weighted(graph, writer).target) in WEIGHT_AXES for writer in stream.writers)


def _live(graph: Graph) -> set[fx.Node]:
    """The nodes that depend on an input, so are no weights."""
    live: set[fx.Node] = set()
    for node in graph.fx.nodes:
        if node.op == "placeholder" or any(source in live for source in node.all_input_nodes):
            live.add(node)
    return live
