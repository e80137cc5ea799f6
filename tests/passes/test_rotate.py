"""Rotation keeps the function, flattens outliers, and refuses what it cannot rotate."""

from __future__ import annotations

import re

import pytest
import torch

from qcompile import check, ops
from qcompile.errors import UsageError
from qcompile.graph import Graph
from qcompile.passes import dataflow
from qcompile.passes.base import apply
from qcompile.passes.rotate import Rotate
from tests.codegen.cpu.test_experts import decoder as mixture
from tests.support.graphs import decoder, sequence_inputs


def refused(graph: Graph, reason: str) -> None:
    """The stream is unchanged, with the reason in the notes; values are rotated nevertheless."""
    result = apply(Rotate(), graph)
    assert result.fired == 2 * len(graph.calls("attention"))
    assert [note for note in result.notes if re.search(reason, note)] == list(result.notes) != []
    assert check.equivalent(result.graph, graph, sequence_inputs()) < 1e-13
    assert apply(Rotate(heads=False), graph).fired == 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("hidden", [48, 64])
def test_rotation_keeps_the_function(bias: bool, hidden: int) -> None:
    before = decoder(bias=bias, hidden=hidden)
    result = apply(Rotate(), before)
    assert result.fired == 1 + 10 + 4 + 1 + 4  # embedding, readers, writers, head, and v and o per head
    assert check.equivalent(result.graph, before, sequence_inputs()) < 1e-13  # float64


def test_a_decoder_has_one_stream() -> None:
    (stream,) = dataflow.residual_streams(decoder())
    assert len(stream.writers) == 5 and stream.width == 48
    assert len(list(dataflow.carried(stream.reads))) == 2 * 5 + 1


def test_rotation_spreads_an_outlier_channel() -> None:
    graph = decoder(hidden=64)
    loud = graph.weights["embed"].clone()
    loud[:, 5] *= 100
    graph.weights.add_tensor("embed", loud)
    turned = Rotate().run(graph).graph
    rotated = turned.evaluate(turned.calls("embedding")[0].args[1])
    peak = [(w.abs().amax(0).max() / w.norm(dim=0).mean()).item() for w in (loud, rotated)]
    assert peak[1] < peak[0] / 5


@pytest.mark.parametrize("seed", [-1, 10**30])
def test_a_seed_that_no_generator_takes_is_refused(seed: int) -> None:
    with pytest.raises(UsageError, match="must be from 0"):
        Rotate(seed=seed)


def test_two_seeds_rotate_differently() -> None:
    one, two = (Rotate(seed=s).run(decoder()).graph for s in (0, 1))
    weights = [g.evaluate(g.calls("embedding")[0].args[1]) for g in (one, two)]
    assert not torch.equal(*weights)


def test_a_stream_read_by_something_else_is_refused_by_name() -> None:
    graph = decoder(layers=1)
    add = graph.calls("add")[0]
    with graph.fx.inserting_after(add):
        bent = graph.call("unary", add, "tanh")
    graph.calls("rms_norm")[1].update_arg(0, bent)
    refused(graph, rf"rotate: node {bent.name}: .* read by unary")


def test_a_stream_written_by_something_else_is_refused_by_name() -> None:
    graph = decoder(layers=1)
    down = graph.calls("linear")[-2]
    add = graph.calls("add")[-1]
    with graph.fx.inserting_before(add):
        bent = graph.call("unary", down, "tanh")
    add.update_arg(1, bent)
    refused(graph, rf"node {bent.name}: .* written by unary")


@pytest.mark.parametrize("kind", ["linear", "unary"])
def test_what_reads_a_stream_and_writes_it_does_both(kind: str) -> None:
    """x + f(x) without a norm in between: f is a reader and a writer."""
    graph = decoder(layers=1)
    add = graph.calls("add")[0]
    graph.weights.add_tensor("square", torch.randn(48, 48, generator=torch.Generator().manual_seed(0)) / 7)
    square = graph.weight("square")
    with graph.fx.inserting_after(add):
        bent = graph.call("linear", add, square) if kind == "linear" else graph.call("unary", add, "tanh")
    with graph.fx.inserting_after(bent):
        both = graph.call("add", add, bent)
    graph.calls("rms_norm")[1].update_arg(0, both)
    if kind == "unary":
        refused(graph, "read by unary")
    else:
        assert refusal_free(graph) == 1 + 5 + 2 + 1 + 2 + 2


def test_a_norm_with_weights_of_its_own_is_refused() -> None:
    graph = decoder(layers=1)
    norm = graph.calls("rms_norm")[0]
    graph.weights.add_tensor("scale", torch.ones(48))
    norm.update_arg(1, graph.weight("scale"))
    refused(graph, "read by rms_norm")


def test_an_order_without_a_matrix_is_refused() -> None:
    refused(decoder(hidden=50), "no Hadamard matrix of order 50")


def test_a_width_without_a_matrix_is_rotated_in_blocks() -> None:
    before = decoder(hidden=688, layers=1)  # 16 * 43: no construction yields a multiple of 43 here
    assert refusal_free(before) > 0


def refusal_free(graph: Graph, **options: bool) -> int:
    result = apply(Rotate(**options), graph)
    assert not result.notes and check.equivalent(result.graph, graph, sequence_inputs()) < 1e-13
    return result.fired


@pytest.mark.parametrize("ffn", [64, 72, 80, 96])
@pytest.mark.parametrize("act", ["silu", "relu"])
def test_online_rotation_of_down_projections(ffn: int, act: str) -> None:
    before = decoder(ffn=ffn, act=act)
    assert refusal_free(before, residual=False, heads=False, online=True) == 2
    after = apply(Rotate(online=True), before).graph
    assert [n.args[0].target.name() for n in after.calls("hadamard")] == ["qcompile::mul"] * 2
    assert all(n.args[2] == ffn for n in after.calls("hadamard"))


@pytest.mark.parametrize("act", ["gelu", "xielu"])
def test_online_rotation_of_activations(act: str) -> None:
    before = decoder(act=act)
    for product in before.calls("mul"):
        before.replace(product, product.args[0])
    before.erase_dead()
    assert refusal_free(before, residual=False, heads=False, online=True) == 2


def test_online_rotation_of_what_experts_read() -> None:
    before = mixture()
    result = apply(Rotate(residual=False, heads=False, online=True), before)
    (turned,) = result.graph.calls("hadamard")
    assert result.fired == 1 and [ops.name_of(user.target) for user in turned.users] == ["expert_linear"]
    assert check.equivalent(result.graph, before, sequence_inputs()) < 1e-14


def test_one_writer_too_few_is_noticed() -> None:
    before = decoder()
    after = Rotate().run(before).graph
    forgotten = after.calls("linear")[3]
    forgotten.update_arg(1, forgotten.args[1].args[0])
    assert check.equivalent(after, before, sequence_inputs()) > 1e-3
