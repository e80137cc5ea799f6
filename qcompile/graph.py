"""A model as a graph of `qcompile::` operators over weights that stay on disk.

`Graph` wraps a torch.fx graph with `get_attr` nodes that name entries of a `WeightStore`. Before the `cache` stage its
inputs are (token_ids [B, T], positions [B, T]) and its output is logits [B, T, V]; from then on it is a step, as
described in passes/cache.py.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.calibration import Calibration
from qcompile.errors import UsageError

FORMAT_VERSION = 1
KEPT_META = ("precision", "storage", "packed")
"""Annotations by passes that belong to the graph and are serialized with it."""


@dataclass(frozen=True)
class ModelInfo:
    """Facts about the model that are not in the graph.

    `parameters` counts tied weights once. `left_out` has the modules that no text reaches, as a vision tower, and their
    bytes in the checkpoint. `stated_position` is the context that the model states, if `max_position` is less.
    `embeds_scale` is the factor between a row of the token embedding's table and what transformers' `inputs_embeds`
    have for its token; 0 if they are no multiple of a row. `adapters` are those merged into the weights, with
    their factors. `remarks` say, a line each, what of the checkpoint the model does not use, or what it lacks.
    """

    name: str
    vocab_size: int
    max_position: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    parameters: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    stated_position: int | None = None
    embeds_scale: float = 1.0
    adapters: Mapping[str, float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """What the manifest records about the model."""
        facts = asdict(self) | {"eos_token_ids": list(self.eos_token_ids)}
        usual: dict[str, Any] = {"left_out": {}, "stated_position": None, "embeds_scale": 1.0, "adapters": {}}
        usual["remarks"] = ()
        return {key: value for key, value in facts.items() if key not in usual or value != usual[key]}


@dataclass
class Weight:
    """A named weight: its shape and dtype, and a function that loads its values on demand.

    `mask` loads values that may be infinite, as those added to scores; None: use `load`. `few_bits`: the values are the
    numbers that a checkpoint stores in few bits, in any order. `stored` is the type of floats in which a checkpoint
    or a module has them as they are; None if they are computed.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]
    mask: Callable[[], Tensor] | None = None
    few_bits: bool = False
    stored: torch.dtype | None = None


@dataclass
class WeightStore:
    """Weights by name, loaded one at a time and never kept, so that an 8B model need not fit in memory."""

    entries: dict[str, Weight] = field(default_factory=dict)

    def add(
        self,
        name: str,
        shape: Iterable[int],
        dtype: torch.dtype,
        load: Callable[[], Tensor],
        mask: Callable[[], Tensor] | None = None,
        few_bits: bool = False,
        stored: torch.dtype | None = None,
    ) -> None:
        """Register `name`; each call of `load()` must return a tensor of that shape and dtype."""
        self.entries[name] = Weight(tuple(shape), dtype, load, mask, few_bits, stored)

    def add_tensor(self, name: str, value: Tensor) -> None:
        """Register a small constant held in memory."""
        self.add(name, value.shape, value.dtype, lambda: value)

    def __getitem__(self, name: str) -> Tensor:
        return self.entries[name].load()

    def mask(self, name: str) -> Tensor:
        """The values of `name` as a mask, where some may be infinite."""
        entry = self.entries[name]
        return (entry.mask or entry.load)()

    def __contains__(self, name: str) -> bool:
        return name in self.entries


class _Runner(fx.Interpreter):
    """Runs a graph with weights from its store, floating-point ones cast to `dtype`."""

    def __init__(self, graph: Graph, dtype: torch.dtype | None) -> None:
        super().__init__(torch.nn.Module(), garbage_collect_values=True, graph=graph.fx)
        self.weights, self.dtype = graph.weights, dtype

    def fetch_attr(self, target: str) -> Tensor:
        value = self.weights[target]
        return value.to(self.dtype) if self.dtype and value.is_floating_point() else value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Tensor:
        return self.fetch_attr(target)


class Graph:
    """An fx graph with its weights, its stage, and facts about the model.

    `calibration` is text on which passes may measure activations; None if there are only weights.
    """

    def __init__(self, graph: fx.Graph, weights: WeightStore, info: ModelInfo, stage: str = "import") -> None:
        self.fx, self.weights, self.info, self.stage = graph, weights, info, stage
        self.calibration: Calibration | None = None

    # ---- reading -----------------------------------------------------------------------------

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes in order, as a list that does not change while the graph is rewritten."""
        return list(self.fx.nodes)

    def calls(self, *names: str) -> list[fx.Node]:
        """Nodes that call qcompile::name for one of `names` (without names: any of ours), in order."""
        named = ((node, ops.name_of(node.target)) for node in self.nodes if node.op == "call_function")
        return [node for node, name in named if name and (not names or name in names)]

    @property
    def inputs(self) -> list[fx.Node]:
        """Placeholders in order."""
        return [node for node in self.fx.nodes if node.op == "placeholder"]

    @property
    def output(self) -> fx.Node:
        """The single output node."""
        return next(node for node in reversed(self.fx.nodes) if node.op == "output")

    def is_weight(self, node: Any) -> bool:
        """Whether `node` depends on weights only, so that it can be computed when the artifact is built."""
        frontier = [node] if isinstance(node, fx.Node) else []
        seen: set[fx.Node] = set()
        while frontier:  # recursion could overflow on a deep model; first operands lead to inputs soonest
            current = frontier.pop()
            if current.op not in ("call_function", "get_attr"):
                return False
            if current not in seen:
                seen.add(current)
                frontier += reversed(current.all_input_nodes)
        return True

    def run(self, *inputs: Any, dtype: torch.dtype | None = None) -> Any:
        """Run with reference bodies. With `dtype`, weights are cast to it first (float64 for exact checks)."""
        return _Runner(self, dtype).run(*inputs)

    def evaluate(self, node: fx.Node, vectors: dict[fx.Node, Any] | None = None) -> Any:
        """The value of a weight node: loads its weights and runs its operators.

        `vectors` caches computed vectors between calls: many weights share an order or a scale, and computing one may
        take all weights of the model. It may hold values of other nodes too, which are then not computed.
        """

        def value(item: Any) -> Any:
            return fx.node.map_arg(item, lambda n: self.evaluate(n, vectors))

        if node.op == "get_attr":
            return self.weights[str(node.target)]
        if vectors is not None and node in vectors:
            return vectors[node]
        assert callable(node.target), node
        name = ops.name_of(node.target)
        # Call the body directly: the first call through torch's dispatcher imports its compiler, which takes a second.
        function = ops.reference(name) if name else node.target
        result = function(*value(node.args), **value(node.kwargs))
        if vectors is not None and isinstance(result, Tensor) and result.dim() == 1:
            vectors[node] = result
        return result

    # ---- rewriting ---------------------------------------------------------------------------

    def clone(self) -> Graph:
        """A copy to rewrite, with weight expressions first. It copies the weight store's table, not the values."""
        copied = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        result = copied.graph_copy(self.fx, values)
        copied.output(result)
        for old, new in values.items():
            new.meta = dict(old.meta)
        clone = Graph(copied, WeightStore(dict(self.weights.entries)), self.info, self.stage)
        clone.calibration = self.calibration
        clone._hoist_weights()
        return clone

    def _hoist_weights(self) -> None:
        """Move all nodes that depend on weights only to the top, in their order."""
        weights: dict[fx.Node, None] = {}
        for node in self.fx.nodes:
            if node.op == "get_attr" or (
                node.op == "call_function" and all(source in weights for source in node.all_input_nodes)
            ):
                weights[node] = None
        anchor = next(node for node in self.fx.nodes if node not in weights)
        for node in weights:
            anchor.prepend(node)

    def call_weight(self, name: str, *args: Any, **operands: Any) -> fx.Node:
        """qcompile::name on weights, after all existing weight expressions and before any activation."""
        with self.fx.inserting_before(self.inputs[0]):  # every activation depends on an input
            return self.call(name, *args, **operands)

    def call(self, name: str, *args: Any, **operands: Any) -> fx.Node:
        """Create qcompile::name at the insertion point and infer its shape. Operands may be given by name."""
        node = self.create(name, *args, **operands)
        self.infer_node(node)
        return node

    def create(self, name: str, *args: Any, **operands: Any) -> fx.Node:
        """As `call`, but the caller infers the node's shape later, when the shapes of its inputs are known."""
        given = ops.arguments(name, args, operands)
        return self.fx.create_node("call_function", ops.op(name), given, name=name)

    def weight(self, name: str) -> fx.Node:
        """The node that reads weight `name`; created at the top of the graph if there is none."""
        for node in self.fx.nodes:
            if node.op == "get_attr" and node.target == name:
                return node
        with self.fx.inserting_before(next(iter(self.fx.nodes))):
            node = self.fx.create_node("get_attr", name)
        self.infer_node(node)
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Make every user of `old` read `new`, and erase `old`."""
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.fx.erase_node(old)

    def erase_dead(self) -> None:
        """Erase nodes without users; inputs stay."""
        for node in reversed(self.nodes):
            if not node.users and node.op in ("call_function", "get_attr"):
                self.fx.erase_node(node)

    # ---- shapes ------------------------------------------------------------------------------

    def infer_node(self, node: fx.Node) -> None:
        """Set node.meta["val"] to meta tensors of the node's shape and dtype."""
        if node.op == "get_attr":
            entry = self.weights.entries[str(node.target)]
            node.meta["val"] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        elif node.op == "call_function" and callable(node.target):
            args = fx.node.map_arg(node.args, lambda n: n.meta["val"])
            node.meta["val"] = node.target(*args, **fx.node.map_arg(node.kwargs, lambda n: n.meta["val"]))

    def infer(self, inputs: Iterable[Tensor]) -> None:
        """Infer every node's shape from meta tensors for the inputs."""
        for node, value in zip(self.inputs, inputs, strict=True):
            node.meta["val"] = value
        for node in self.fx.nodes:
            self.infer_node(node)

    # ---- text --------------------------------------------------------------------------------

    def content(self) -> Iterator[bytes]:
        """The graph as JSON, then the bytes of each weight that it reads: all that its results depend on."""
        yield self.to_json().encode()
        for node in self.nodes:
            if node.op == "get_attr":
                value = self.weights[str(node.target)]
                yield value.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    def to_json(self) -> str:
        """The graph as versioned JSON: nodes in order, weights by name; no code, no pickle."""
        nodes = [_describe(node) for node in self.fx.nodes]
        document = {"format_version": FORMAT_VERSION, "stage": self.stage, "model": self.info.facts, "nodes": nodes}
        return json.dumps(document, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str, weights: WeightStore) -> Graph:
        """The graph that to_json wrote. Raises UsageError for another version or an unknown operator."""
        document = json.loads(text)
        if document.get("format_version") != FORMAT_VERSION:
            raise UsageError(
                f"graph file has format {document.get('format_version')}, this qcompile reads {FORMAT_VERSION}"
            )
        graph = fx.Graph()
        known: dict[str, fx.Node] = {}
        for item in document["nodes"]:
            known[item["name"]] = _rebuild(graph, item, known)
        model = document["model"]
        model |= {name: tuple(model[name]) for name in ("eos_token_ids", "remarks") if name in model}
        return Graph(graph, weights, ModelInfo(**model), document["stage"])


def _describe(node: fx.Node) -> dict[str, Any]:
    def encode(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return {"node": item.name}
        if isinstance(item, (list, tuple)):
            return [encode(entry) for entry in item]
        return item

    value = node.meta.get("val")
    shapes = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in _tensors(value)]
    target = {"call_function": ops.name_of(node.target) or "getitem"}.get(node.op, str(node.target))
    extra = {key: node.meta[key] for key in KEPT_META if node.meta.get(key)}
    return {"name": node.name, "op": node.op, "target": target, "args": encode(node.args), "shapes": shapes, **extra}


def _rebuild(graph: fx.Graph, item: dict[str, Any], known: dict[str, fx.Node]) -> fx.Node:
    def decode(value: Any) -> Any:
        if isinstance(value, dict):
            return known[value["node"]]
        return [decode(entry) for entry in value] if isinstance(value, list) else value

    target: Any = item["target"]
    if item["op"] == "call_function":
        try:
            target = operator.getitem if target == "getitem" else ops.op(target)
        except KeyError:
            raise UsageError(f"graph file names operator {target}, which this qcompile does not have") from None
    node = graph.create_node(item["op"], target, tuple(decode(item["args"])), {}, item["name"])
    node.meta.update({key: item[key] for key in KEPT_META if key in item})
    return node


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
