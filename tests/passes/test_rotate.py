"""Rotation keeps the function, flattens outliers, and refuses what it cannot carry."""

from __future__ import annotations

import pytest
import torch

from qcompile import analysis, check
from qcompile.errors import PassError
from qcompile.passes.base import apply
from qcompile.passes.rotate import Rotate
from tests.graphs import decoder, sequence_inputs


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("hidden", [48, 64])
def test_rotation_keeps_the_function(bias: bool, hidden: int) -> None:
    before = decoder(bias=bias, hidden=hidden)
    result = apply(Rotate(), before)
    assert result.fired == 1 + 10 + 4 + 1 + 4  # embedding, readers, writers, head, and v and o by head
    assert check.equivalent(result.graph, before, sequence_inputs()) < 1e-13  # float64


def test_a_decoder_has_one_stream() -> None:
    (stream,) = analysis.residual_streams(decoder())
    assert len(stream.writers) == 5 and stream.width == 48
    assert len(list(analysis.carried(stream.reads))) == 2 * 5 + 1


def test_rotation_spreads_an_outlier_channel() -> None:
    graph = decoder(hidden=64)
    loud = graph.weights["embed"].clone()
    loud[:, 5] *= 100
    graph.weights.add_tensor("embed", loud)
    turned = Rotate().run(graph).graph
    rotated = turned.evaluate(turned.calls("embedding")[0].args[1])
    peak = [(w.abs().amax(0).max() / w.norm(dim=0).mean()).item() for w in (loud, rotated)]
    assert peak[1] < peak[0] / 5


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
    with pytest.raises(PassError, match=rf"rotate: node {bent.name}: .* read by unary"):
        Rotate().run(graph)


def test_a_stream_written_by_something_else_is_refused_by_name() -> None:
    graph = decoder(layers=1)
    down = graph.calls("linear")[-2]
    add = graph.calls("add")[-1]
    with graph.fx.inserting_before(add):
        bent = graph.call("unary", down, "tanh")
    add.update_arg(1, bent)
    with pytest.raises(PassError, match=rf"node {bent.name}: .* written by unary"):
        Rotate().run(graph)


def test_a_norm_with_weights_of_its_own_is_refused() -> None:
    graph = decoder(layers=1)
    norm = graph.calls("rms_norm")[0]
    graph.weights.add_tensor("scale", torch.ones(48))
    norm.update_arg(1, graph.weight("scale"))
    with pytest.raises(PassError, match="read by rms_norm"):
        Rotate().run(graph)


def test_an_order_without_a_matrix_is_refused() -> None:
    with pytest.raises(PassError, match="no Hadamard matrix of order 50"):
        Rotate().run(decoder(hidden=50))


def test_one_writer_too_few_is_noticed() -> None:
    before = decoder()
    after = Rotate().run(before).graph
    forgotten = after.calls("linear")[3]
    forgotten.update_arg(1, forgotten.args[1].args[0])
    assert check.equivalent(after, before, sequence_inputs()) > 1e-3
