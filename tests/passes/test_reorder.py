"""Reorder: channels are sorted by size, the function stays the same, and what cannot move is named."""

from __future__ import annotations

import pytest
import torch

from qcompile import check
from qcompile.calibration import Calibration
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph
from qcompile.passes import dataflow
from qcompile.passes.base import PassResult, apply
from qcompile.passes.reorder import Reorder
from qcompile.passes.rotate import Rotate
from tests.support.graphs import decoder, sequence_inputs


def reordered(before: Graph) -> PassResult:
    result = apply(Reorder(), before)
    assert check.equivalent(result.graph, before, sequence_inputs()) < 1e-13
    return result


SHAPES = [{}, {"bias": True}, {"head_norm": "heads"}, {"head_dim": 40, "bias": "v"}, {"act": "xielu"}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_function_stays(shape: dict[str, object]) -> None:
    result = reordered(decoder(**shape))  # type: ignore[arg-type]
    # The stream and two MLPs; a value head of 40 channels crosses group borders, one of 16 does not.
    assert result.fired == 3 + 2 * ("head_dim" in shape)
    assert len(result.notes) == 2 and all("merge_heads makes these channels" in note for note in result.notes)


def test_columns_stand_by_size() -> None:
    graph = reordered(decoder(layers=1)).graph
    down = graph.calls("linear")[-2]
    sizes = graph.evaluate(down.args[1]).norm(dim=0)
    assert (sizes.diff() <= 1e-6).all() and sizes[0] > 1.2 * sizes[-1]


def test_columns_stand_by_size_within_each_value_head() -> None:
    graph = reordered(decoder(layers=1, head_dim=40)).graph
    columns = graph.evaluate(graph.calls("linear")[3].args[1]).unflatten(1, (2, 2, 40))  # [N, Hk, group, D]
    sizes = columns.norm(dim=(0, 2))
    assert (sizes.diff() <= 1e-6).all() and (sizes[:, 0] > 1.2 * sizes[:, -1]).all()


def test_outliers_come_last() -> None:
    """Measured on text, not weights: the channels that norms make large come last."""
    before = decoder(layers=2)
    loud = torch.ones(48)
    loud[[3, 17, 40]] = 30.0
    for index, norm in enumerate(before.calls("rms_norm")[:-1]):
        before.weights.add_tensor(f"loud{index}", loud)
        norm.update_arg(1, before.weight(f"loud{index}"))
    untold = apply(Reorder(outliers=True), before)
    assert untold.fired == 0 and "without calibration text" in untold.notes[0]
    before.calibration = Calibration(torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0)))
    result = apply(Reorder(outliers=True), before)
    assert check.equivalent(result.graph, before, sequence_inputs()) < 1e-13
    assert result.fired == 3
    norm = result.graph.calls("rms_norm")[0]
    weight = result.graph.evaluate(norm.args[1])
    assert (weight[-3:] == 30).all() and (weight[:-3] == 1).all()


def test_norm_weights_and_constants_move_along() -> None:
    before = decoder(layers=1)
    for index, norm in enumerate(before.calls("rms_norm")):
        before.weights.add_tensor(f"scale{index}", torch.rand(48, generator=torch.Generator().manual_seed(index)))
        norm.update_arg(1, before.weight(f"scale{index}"))
    before.weights.add_tensor("constant", torch.arange(48.0))
    add = before.calls("add")[0]
    constant = before.weight("constant")
    with before.fx.inserting_after(add):
        moved = before.call("add", add, constant)
    before.calls("rms_norm")[1].update_arg(0, moved)
    before.calls("add")[2].update_arg(0, moved)
    assert reordered(before).fired == 2
    (stream, *_) = dataflow.channel_spaces(before.clone())
    assert len(stream.vectors) == 4 and len(stream.writers) == 3 and len(stream.readers) == 6


def test_similar_channels_share_groups() -> None:
    """Large channels in every group widen all ranges; together they widen one."""
    before = decoder(layers=1, ffn=512)
    down = before.calls("linear")[-2]
    loud = before.weights["down0"].clone()
    loud[:, ::32] *= 20
    before.weights.add_tensor("down0", loud)
    after = reordered(before).graph

    def error(graph: Graph, node: torch.fx.Node) -> float:
        weight = graph.evaluate(node.args[1])  # type: ignore[arg-type]
        parts = weight_format("w4_asym_g128").quantize(weight)
        return (weight_format("w4_asym_g128").dequantize(parts, 512) - weight).norm().item()

    assert error(after, after.calls("linear")[-2]) < 0.8 * error(before, down)


def test_features_read_by_place_stay() -> None:
    before = decoder(layers=1)
    down, product = before.calls("linear")[-2], before.calls("mul")[0]
    with before.fx.inserting_before(down):
        first = before.call("slice_features", product, 0, 36)
        second = before.call("slice_features", product, 36, 72)
        swapped = before.call("add", first, second)
    before.weights.add_tensor("down0", before.weights["down0"][:, :36].clone())
    before.infer_node(before.weight("down0"))
    down.update_arg(0, swapped)
    result = reordered(before)
    assert result.fired == 1
    assert any("slice_features makes these channels" in note for note in result.notes)


def test_an_online_rotation_keeps_the_order() -> None:
    turned = apply(Rotate(residual=False, heads=False, online=True), decoder(layers=1)).graph
    result = reordered(turned)
    assert result.fired == 1 and any("hadamard makes these channels" in note for note in result.notes)


def test_a_forgotten_reader_is_noticed() -> None:
    before = decoder()
    after = apply(Reorder(), before).graph
    forgotten = after.calls("linear")[5]
    forgotten.update_arg(1, forgotten.args[1].args[0])
    assert check.equivalent(after, before, sequence_inputs()) > 1e-3


def test_orders_are_computed_once() -> None:
    graph = apply(Reorder(), decoder()).graph
    loads: list[str] = []
    for name, entry in graph.weights.entries.items():
        load = entry.load
        entry.load = lambda name=name, load=load: (loads.append(name), load())[1]  # type: ignore[misc]
    vectors: dict[torch.fx.Node, torch.Tensor] = {}
    for node in graph.calls("linear", "embedding"):
        graph.evaluate(node.args[1], vectors)  # type: ignore[arg-type]
    assert max(loads.count(name) for name in loads) <= 4  # for itself, its column order, its row order
