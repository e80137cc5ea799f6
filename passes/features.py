"""Features: a model returns its hidden states to a draft head, and a head its own to itself, for all rows of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, fx

from qcompile.errors import PassError
from qcompile.formats.activations import activation_format
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph, Weight
from qcompile.heads.layout import default_layers
from qcompile.heads.reading import HeadFile
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.streams import residual_stream, stream_rotation

PRECISION = "bf16"
"""Format in which a target fuses its hidden states: they have outliers, which 8 bits per row would not keep."""


@dataclass(frozen=True)
class FuseFeatures(Pass):
    """A step of the target also returns `fc` of the hidden states that a draft head reads, joined, for each row.

    The product is a sum of one product for each hidden state, computed as soon as that is known. The residual stream is
    found by dataflow (streams.py); where it is rotated, the weights are rotated to read it. They are those of `head`,
    and are called `origin` + name.
    """

    name: ClassVar[str] = "fuse_features"
    requires: ClassVar[tuple[str, ...]] = ("cache",)
    head: HeadFile
    origin: str

    def options(self) -> dict[str, Any]:
        return {"layers": list(self.head.layers)}

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        stream = residual_stream(graph, self.name)
        states, signs = stream.states, stream_rotation(graph, stream, self.name)
        layers = head_layers(self.head, len(states) - 1)
        read = [states[layer] for layer in layers]
        width = read[0].meta["val"].shape[-1]
        if self.head.fused != len(read) * width:
            reason = f"the head reads {self.head.fused} features, {len(read)} hidden states have {len(read) * width}"
            raise PassError(self.name, read[0].name, reason)
        fused: fx.Node | None = None
        for number, state in enumerate(read):
            columns = number * width, (number + 1) * width
            fused = self._product(graph, state, columns, fused, signs)
        assert fused is not None
        returned(graph, fused)
        return PassResult(graph, len(read), (f"reads the hidden states after layers {', '.join(map(str, layers))}",))

    def _product(
        self, graph: Graph, state: fx.Node, columns: tuple[int, int], fused: fx.Node | None, signs: fx.Node | None
    ) -> fx.Node:
        """`fused` plus the product of `state` with these columns of the weight, rotated as the state is."""
        stored = self.head.weights["fc.weight"]
        name = f"{self.origin}fc.weight.{columns[0]}"
        shape = (stored.shape[0], columns[1] - columns[0])
        graph.weights.entries[name] = Weight(shape, stored.dtype, partial(_columns, stored, *columns))
        columns_read = graph.weight(name)
        if signs is not None:
            columns_read = graph.call_weight("rotate", columns_read, signs=signs, axis=1)
        weight = graph.call_weight("quantize_weight", columns_read, PRECISION)
        group = activation_format(PRECISION).sum_group(weight_format(PRECISION).sum_group, shape[1])
        after = max((state, *([fused] if fused else [])), key=graph.nodes.index)
        with graph.fx.inserting_after(after):
            rounded = graph.call("quantize_activation", state, PRECISION, group)
        with graph.fx.inserting_after(rounded):
            product = graph.call(
                "gemm",
                rounded,
                weight,
                bias=None,
                residual=fused,
                format=PRECISION,
                epilogue="add" if fused else "store",
                width=shape[0],
            )
        product.meta["precision"] = {"weight": PRECISION, "activation": PRECISION}
        return product


@dataclass(frozen=True)
class ReturnFeatures(Pass):
    """A step of a draft head also returns its residual stream after its layer, which it reads at the next position."""

    name: ClassVar[str] = "return_features"
    requires: ClassVar[tuple[str, ...]] = ("cache",)

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        returned(graph, residual_stream(graph, self.name).states[-1])
        return PassResult(graph, 1)


def head_layers(head: HeadFile, depth: int) -> tuple[int, ...]:
    """The hidden states that `head` reads of a model of `depth` layers: n is the residual stream after n layers.

    Some files count the layers after which they are read from 0: their numbers are the usual ones less 1.
    Raises UsageError for layers that the model does not have.
    """
    layers = head.layers or default_layers(depth)
    if depth > 5 and layers == tuple(layer - 1 for layer in default_layers(depth)):
        layers = default_layers(depth)
    if not layers or min(layers) < 0 or max(layers) > depth:
        raise PassError(
            FuseFeatures.name, "output", f"draft {head.path} reads layers {layers} of a model of {depth} layers"
        )
    return layers


def returned(graph: Graph, value: fx.Node) -> None:
    """Let a step return `value` [M, F] besides its other results."""
    with graph.fx.inserting_after(value):
        written = graph.call("write_features", value)
    graph.output.args = ((*graph.output.args[0], written),)  # type: ignore[misc]


def _columns(stored: Weight, first: int, end: int) -> Tensor:
    return stored.load()[:, first:end].contiguous()
