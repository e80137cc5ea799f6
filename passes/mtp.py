"""The raised graph of a module for multi-token prediction, cut out of a raised graph of the model with its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import fx

from qcompile import ops
from qcompile.checkpoints.loaders import StoredLoader
from qcompile.checkpoints.renamed import RenamedCheckpoint
from qcompile.errors import UnsupportedError
from qcompile.graph import Graph, Weight, WeightStore
from qcompile.heads import mtp_files as roles
from qcompile.heads.graph import INPUTS
from qcompile.heads.mtp_files import MtpModule
from qcompile.passes.streams import residual_stream

NAME = "mtp"


@dataclass(frozen=True)
class MtpSource:
    """A module, and the raised graph of the model with the module's layer in place of the one like it.

    `checkpoint` is what that graph has its weights from.
    """

    module: MtpModule
    raised: Graph
    checkpoint: RenamedCheckpoint


def mtp_graph(source: MtpSource, origin: str) -> Graph:
    """The module at stage `raise`. The names of its own weights begin with `origin`.

    Its inputs are token_ids and positions int64 [B, T], and features [B, T, F]: the final hidden state, normalized, of
    the model at the position before, or of the module. Its output is logits [B, T, V]. The embedding and the output
    head are the model's, and keep their names.

    Raises UnsupportedError, with the node, if the layer reads more than the residual stream, UsageError if the module
    has another width than the model.
    """
    return _Cut(source, origin).graph()


class _Cut:
    """Copies the layer, the embedding before and the output behind it into a graph of their own."""

    def __init__(self, source: MtpSource, origin: str) -> None:
        self.source, self.origin, raised = source, origin, source.raised
        self.states = residual_stream(raised, NAME).states
        parameters = sum(int(np.prod(raised.weights.entries[name].shape)) for name in self._layer_weights())
        info = replace(raised.info, name=NAME, parameters=parameters, left_out={}, adapters={}, remarks=())
        self.made = Graph(fx.Graph(), WeightStore(), info, "raise")
        self.values: dict[fx.Node, fx.Node] = {}

    def graph(self) -> Graph:
        """The graph of the module."""
        raised, graph = self.source.raised, self.made
        ids, positions, features = (graph.fx.placeholder(name) for name in INPUTS)
        begin, end = self._layer()
        width = begin.meta["val"].shape[-1]
        self.source.checkpoint.require(self.source.module.roles[roles.HIDDEN_NORM], (width,))
        for node, kind in ((ids, torch.int64), (positions, torch.int64)):
            node.meta["val"] = torch.empty(2, 7, dtype=kind, device="meta")
        features.meta["val"] = torch.empty(2, 7, width, device="meta")
        self.values |= dict(zip(raised.inputs, (ids, positions), strict=False))
        embedded = self._copied(self.states[0])
        self._require_shared(roles.EMBEDDING, self.states[0])
        joined = self._joined(embedded, graph.call("read_features", features), self._first_norm(begin))
        self.values[begin] = graph.call("linear", joined, self._own(roles.FUSION))
        self.values[self.states[-1]] = self._copied(end)
        graph.fx.output(self._output())
        return graph

    # ---- where the layer is -----------------------------------------------------------------------

    def _layer(self) -> tuple[fx.Node, fx.Node]:
        """The residual stream before and after the layer."""
        for begin, end in zip(self.states, self.states[1:], strict=False):
            if any(self._of_layer(node) for node in self._between(begin, end)):
                return begin, end
        raise UnsupportedError(f"draft mtp: no layer in the graph of the model reads {self.source.module.model_layer}*")

    def _of_layer(self, node: fx.Node) -> bool:
        """Whether `node` reads a tensor of the layer as it is stored."""
        load = self.source.raised.weights.entries[str(node.target)].load if node.op == "get_attr" else None
        return isinstance(load, StoredLoader) and load.name in self.source.module.layer

    def _between(self, begin: fx.Node, end: fx.Node) -> set[fx.Node]:
        """What `end` is computed from, without `begin` and what that is computed from."""
        sources, frontier = {end}, [end]
        while frontier:
            more = [node for node in frontier.pop().all_input_nodes if node not in sources and node is not begin]
            sources.update(more)
            frontier += more
        return sources

    def _layer_weights(self) -> set[str]:
        begin, end = self._layer()
        return {str(node.target) for node in self._between(begin, end) if node.op == "get_attr"}

    def _first_norm(self, begin: fx.Node) -> fx.Node:
        """The norm through which the layer reads the residual stream: those of the module are of its kind."""
        norm = next((node for node in begin.users if ops.name_of(node.target) in ops.NORMS), None)
        if norm is None:
            raise UnsupportedError(f"draft mtp: {begin.name} is not read through a norm")
        return norm

    # ---- copies -----------------------------------------------------------------------------------

    def _copied(self, last: fx.Node) -> fx.Node:
        """`last` in the new graph, with all that it is computed from; known are `values`.

        Raises UnsupportedError if that is another value of the residual stream.
        """
        needed, frontier = {last}, [last]
        while frontier:
            node = frontier.pop()
            if node not in self.values:
                more = [source for source in node.all_input_nodes if source not in needed]
                needed.update(more)
                frontier += more
        for node in self.source.raised.nodes:
            if node not in needed or node in self.values:
                continue
            if node in self.states and node is not last:
                raise UnsupportedError(f"draft mtp: {last.name} also depends on {node.name}, which no module computes")
            self.values[node] = self._copy(node)
        return self.values[last]

    def _copy(self, node: fx.Node) -> fx.Node:
        entries, own = self.source.raised.weights.entries, self.made
        if node.op == "get_attr":
            name = str(node.target)
            shared = all(ops.name_of(user.target) == "embedding" for user in node.users) or self._is_output(node)
            return self._kept(name if shared else self.origin + name, entries[name])
        copied = own.fx.node_copy(node, lambda source: self.values[source])
        own.infer_node(copied)
        return copied

    def _is_output(self, node: fx.Node) -> bool:
        return node in self.source.raised.output.args[0].all_input_nodes  # type: ignore[union-attr]

    def _joined(self, embedded: fx.Node, hidden: fx.Node, norm: fx.Node) -> fx.Node:
        """The embedding and the hidden state beside each other, each normalized as by `norm`, [..., 2 F]."""
        pair = [
            self._normed(embedded, norm, roles.EMBEDDING_NORM),
            self._normed(hidden, norm, roles.HIDDEN_NORM),
        ]
        width = hidden.meta["val"].shape[-1]
        places = torch.arange(2 * width)
        order = pair[::-1] if self.source.module.hidden_first else pair
        index = self._kept(f"{self.origin}joined", Weight(tuple(places.shape), places.dtype, lambda: places))
        return self.made.call("gather_features", order, index)

    def _normed(self, x: fx.Node, norm: fx.Node, role: str) -> fx.Node:
        """`norm` of `x`, with the weight of a role. Raises UnsupportedError if the norm has a bias."""
        operands = ops.named(norm) | {"x": x, "weight": self._norm_weight(norm, role)}
        if operands.get("bias") is not None:
            raise UnsupportedError(f"draft mtp: {norm.name} has a bias, and modules have none")
        return self.made.call(ops.name_of(norm.target) or "", **operands)

    def _norm_weight(self, norm: fx.Node, role: str) -> fx.Node:
        """The weight of a role, computed from what is stored as that of `norm` is.

        Raises UnsupportedError if that is not computed from a single stored tensor.
        """
        given = ops.operand(norm, "weight")
        if not isinstance(given, fx.Node) or given.op != "get_attr":
            raise UnsupportedError(f"draft mtp: {norm.name} has no plain weight")
        entry, checkpoint = self.source.raised.weights.entries[str(given.target)], self.source.checkpoint
        read = checkpoint.read_by(entry.load)
        if len(read) != 1:
            raise UnsupportedError(f"draft mtp: the weight of {norm.name} is computed from {len(read)} stored tensors")
        stored = self.source.module.roles[role]
        load = partial(checkpoint.instead, read.pop(), stored, entry.load)
        return self._kept(self.origin + stored, Weight(entry.shape, entry.dtype, load))

    def _output(self) -> fx.Node:
        """The logits: the model's chain behind its last layer, with the module's norm."""
        logits: fx.Node = self.source.raised.output.args[0]  # type: ignore[assignment]
        norms = [node for node in self.states[-1].users if ops.name_of(node.target) in ops.NORMS]
        if len(norms) != 1:
            raise UnsupportedError(f"draft mtp: {self.states[-1].name} is read by {len(norms)} norms, not by one")
        self.values[norms[0]] = self._normed(self.values[self.states[-1]], norms[0], roles.FINAL_NORM)
        self._require_shared(roles.OUTPUT, logits)
        return self._copied(logits)

    def _require_shared(self, role: str, node: fx.Node) -> None:
        """Raise UnsupportedError if the module brings a tensor in a role that is not the weight of `node`."""
        stored = self.source.module.roles.get(role)
        if stored is None:
            return
        weight = ops.operand(node, "weight") if ops.has_operand(node, "weight") else None
        name = str(weight.target) if isinstance(weight, fx.Node) and weight.op == "get_attr" else ""
        entry = self.source.raised.weights.entries.get(name)
        if entry is None or not torch.equal(entry.load(), self.source.checkpoint.load(stored)):
            raise UnsupportedError(
                f"draft mtp: {stored} differs from the weight of {node.name}, which modules share: store the same "
                "numbers, or leave the tensor out"
            )

    # ---- weights ----------------------------------------------------------------------------------

    def _own(self, role: str) -> fx.Node:
        """The tensor of a role as it is stored."""
        stored, checkpoint = self.source.module.roles[role], self.source.checkpoint
        load = StoredLoader(checkpoint, stored)
        few, kind = load.few_bits, load.stored
        weight = Weight(checkpoint.entries[stored].shape, torch.float32, load, few_bits=few, stored=kind)
        return self._kept(self.origin + stored, weight)

    def _kept(self, name: str, weight: Weight) -> fx.Node:
        """A node that reads the weight `name`."""
        self.made.weights.entries[name] = weight
        return self.made.weight(name)
