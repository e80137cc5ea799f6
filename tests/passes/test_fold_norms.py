"""fold_norms: scales and biases move into all users, or stay with a reason; the function is unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from qcompile import check
from qcompile.checkpoints import frontend
from qcompile.graph import Graph, ModelInfo, WeightStore
from qcompile.passes.base import apply
from qcompile.passes.fold_norms import FoldNorms
from qcompile.passes.raising import Raise
from qcompile.passes.rotate import Rotate
from tests.support import modules

INPUTS = (torch.arange(14).reshape(2, 7), torch.arange(7).expand(2, 7))


class Builder:
    """Builds a raised graph by hand: embedding, one norm, and what the test adds."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.graph = Graph(fx.Graph(), WeightStore(), ModelInfo("hand", 20, 64, None, (), 0), "raise")
        ids = self.graph.fx.placeholder("token_ids")
        self.graph.fx.placeholder("positions")
        for node in self.graph.inputs:
            node.meta["val"] = torch.empty(2, 7, dtype=torch.int64, device="meta")
        self.x = self.graph.call("embedding", ids, self.weight("embed", 20, 16))

    def weight(self, name: str, *shape: int) -> fx.Node:
        self.graph.weights.add_tensor(name, torch.randn(*shape, generator=self.random))
        node = self.graph.fx.create_node("get_attr", name)
        self.graph.infer_node(node)
        return node

    def done(self, logits: fx.Node) -> Graph:
        self.graph.fx.output(logits)
        check.check(self.graph)
        return self.graph


def rms(b: Builder) -> fx.Node:
    return b.graph.call("rms_norm", b.x, b.weight("scale", 16), 1e-5)


def layer(b: Builder) -> fx.Node:
    return b.graph.call("layer_norm", b.x, b.weight("scale", 16), b.weight("shift", 16), 1e-5)


def unscaled(b: Builder) -> fx.Node:
    return b.graph.call("layer_norm", b.x, None, b.weight("shift", 16), 1e-5)


@pytest.mark.parametrize("norm", [rms, layer, unscaled])
@pytest.mark.parametrize("bias", [False, True])
def test_folds_into_every_reader(norm: Callable[[Builder], fx.Node], bias: bool) -> None:
    b = Builder()
    y = norm(b)
    extra = [b.weight("bias", 20)] if bias else []
    made = [b.graph.call("linear", y, b.weight(f"w{i}", 20, 16), *extra) for i in range(3)]
    before = b.done(b.graph.call("add", b.graph.call("mul", made[0], made[1]), made[2]))
    result = apply(FoldNorms(), before)
    assert (result.fired, result.notes) == (1, ())
    (node,) = result.graph.calls("rms_norm", "layer_norm")
    assert all(argument is None for argument in node.args[1:-1])
    assert check.equivalent(result.graph, before, INPUTS) < 1e-14
    assert all(argument is not None for argument in before.calls("rms_norm", "layer_norm")[0].args[2:-1])


def test_text_before_and_after() -> None:
    b = Builder()
    before = b.done(b.graph.call("linear", rms(b), b.weight("w", 20, 16)))
    after = apply(FoldNorms(), before).graph
    lines = [node.format_node().split(" = ", 1)[1] for node in after.calls()]
    assert lines == [
        "call_function[target=torch.ops.qcompile.mul.default](args = (%w, %scale), kwargs = {})",
        "call_function[target=torch.ops.qcompile.embedding.default](args = (%token_ids, %embed), kwargs = {})",
        "call_function[target=torch.ops.qcompile.rms_norm.default](args = (%embedding, None, 1e-05), kwargs = {})",
        "call_function[target=torch.ops.qcompile.linear.default](args = (%rms_norm, %mul), kwargs = {})",
    ]


def test_tied_weight_keeps_its_values_in_the_embedding() -> None:
    b = Builder()
    before = b.done(b.graph.call("linear", rms(b), b.x.args[1]))
    after = apply(FoldNorms(), before).graph
    assert after.calls("embedding")[0].args[1].op == "get_attr"
    assert check.equivalent(after, before, INPUTS) < 1e-14


def test_runs_on_its_own_result() -> None:
    b = Builder()
    once = apply(FoldNorms(), b.done(b.graph.call("linear", layer(b), b.weight("w", 20, 16))))
    assert apply(FoldNorms(), once.graph).fired == 0


def also_residual(b: Builder, y: fx.Node, w: fx.Node) -> fx.Node:
    return b.graph.call("add", b.graph.call("linear", y, w), y)


def also_unary(b: Builder, y: fx.Node, w: fx.Node) -> fx.Node:
    return b.graph.call("mul", b.graph.call("linear", y, w), b.graph.call("unary", y, "silu"))


def heads(b: Builder, y: fx.Node, w: fx.Node) -> fx.Node:
    return b.graph.call("linear", b.graph.call("merge_heads", b.graph.call("split_heads", y, 2)), w)


def as_weight(b: Builder, y: fx.Node, w: fx.Node) -> fx.Node:
    return b.graph.call("linear", b.x, b.graph.call("rms_norm", w, b.weight("other", 16), 1e-5))


@pytest.mark.parametrize(
    ("reader", "reason"),
    [
        (also_residual, "read by add, which is not a linear"),
        (also_unary, "read by unary, which is not a linear"),
        (heads, "read by split_heads, which is not a linear"),
        (as_weight, "read by linear, which is not a linear over it"),
    ],
)
def test_stays_with_a_reason(reader: Callable[[Builder, fx.Node, fx.Node], fx.Node], reason: str) -> None:
    b = Builder()
    y = rms(b) if reader is not as_weight else b.x
    before = b.done(reader(b, y, b.weight("w", 16, 16)))
    result = apply(FoldNorms(), before)
    assert result.fired == 0
    assert len(result.notes) == 1
    assert reason in result.notes[0]
    assert check.equivalent(result.graph, before, INPUTS) == 0


@pytest.mark.parametrize(("style", "takes", "fired", "kept"), [
    (modules.Plain, 1, 5, 0), (modules.Classic, 1, 10, 0), (modules.Modern, 2, 5, 4)
])  # fmt: skip
def test_whole_decoders(style: Callable[..., torch.nn.Module], takes: int, fired: int, kept: int) -> None:
    graph = frontend.load(modules.randomized(style(layers=2)), example_inputs=INPUTS[:takes], max_position=64)
    before = apply(Raise(), graph).graph
    result = apply(FoldNorms(), before)
    assert (result.fired, len(result.notes)) == (fired, kept)
    assert check.equivalent(result.graph, before, INPUTS) < 1e-13


def layer_norm_stream() -> Builder:
    """A stream written by an embedding and a linear, with a constant added, and a layer_norm before the linear."""
    b = Builder()
    written = b.graph.call("linear", layer(b), b.weight("w", 16, 16), b.weight("c", 16))
    b.x = b.graph.call("add", b.graph.call("add", b.x, written), b.weight("constant", 16))
    return b


def test_layer_norms_of_a_stream_become_rms_norms() -> None:
    b = layer_norm_stream()
    b.graph.weights.add_tensor("shift2", torch.ones(16))
    norm = b.graph.call("layer_norm", b.x, None, b.graph.weight("shift2"), 1e-5)
    before = b.done(b.graph.call("linear", norm, b.weight("head", 20, 16)))
    result = apply(FoldNorms(), before)
    assert (result.fired, result.notes) == (2 + 2, ())
    assert not result.graph.calls("layer_norm") and len(result.graph.calls("rms_norm")) == 2
    assert check.equivalent(result.graph, before, INPUTS) < 1e-13
    assert not apply(Rotate(heads=False), result.graph).notes  # the purpose of centering


def test_a_stream_whose_mean_is_read_keeps_layer_norms() -> None:
    b = layer_norm_stream()
    before = b.done(b.graph.call("linear", b.x, b.weight("head", 20, 16)))
    result = apply(FoldNorms(), before)
    assert result.fired == 1 and "reads the residual stream with its mean" in result.notes[0]
    assert check.equivalent(result.graph, before, INPUTS) < 1e-13


def test_a_stream_written_without_weights_keeps_layer_norms() -> None:
    b = layer_norm_stream()
    b.x = b.graph.call("add", b.x, b.graph.call("unary", b.x.args[0], "tanh"))
    norm = b.graph.call("layer_norm", b.x, None, None, 1e-5)
    before = b.done(b.graph.call("linear", norm, b.weight("head", 20, 16)))
    result = apply(FoldNorms(), before)
    assert result.fired == 1 and len(result.notes) == 1
    assert check.equivalent(result.graph, before, INPUTS) < 1e-13
