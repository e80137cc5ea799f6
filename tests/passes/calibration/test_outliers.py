"""Outliers of a report: loud channels are seen before, and gone after, the passes that keep the function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import qcompile
from qcompile.calibration import Calibration, CalibrationSource
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import apply
from qcompile.passes.calibration import outliers
from qcompile.passes.merge import Merge
from qcompile.passes.quantize import Quantize
from qcompile.passes.rotate import Rotate
from qcompile.passes.smooth_attention import SmoothAttention
from qcompile.report import page as report_page
from tests.support.graphs import decoder

LOUD = 20.0


def loud() -> Graph:
    """Channel 5 of the residual stream and key channels 3 and 11 of each head stick out."""
    graph = decoder(hidden=64)
    embed = graph.weights["embed"].clone()
    embed[:, 5] *= LOUD
    graph.weights.add_tensor("embed", embed)
    for name, factor in (("k1", LOUD), ("q1", 1 / LOUD)):
        weight = graph.weights[name].clone().unflatten(0, (-1, 16))
        weight[:, [3, 11]] *= factor
        graph.weights.add_tensor(name, weight.flatten(0, 1))
    graph.calibration = Calibration(torch.randint(0, 50, (3, 24), generator=torch.Generator().manual_seed(2)))
    return graph


def test_loud_channels_stick_out_before_and_not_after() -> None:
    graphs = [loud()]
    for rewrite in (Rotate(), SmoothAttention(alpha=0.5), AssignPrecision("w4_asym_g128", "int8"), Merge(), Quantize()):
        graphs.append(apply(rewrite, graphs[-1]).graph)
    result = outliers.compare(graphs)
    assert list(result) == [outliers.KEYS, outliers.BLOCKS, outliers.OUTPUTS]
    for kind in result.values():
        assert len(kind["before"]) == len(kind["after"]) == 2
    blocks, keys = result[outliers.BLOCKS], result[outliers.KEYS]
    assert min(blocks["before"]) > 1.5 * max(blocks["after"])
    assert keys["before"][1] > 4 * keys["before"][0] and keys["after"][1] < 0.6 * keys["before"][1]


def test_block_inputs_turned_by_an_operator_are_still_block_inputs() -> None:
    """As where norms write the residual stream, which no weight can turn then: reports of such builds broke."""
    graph = loud()
    for add in graph.calls("add"):
        with graph.fx.inserting_before(add):
            add.update_arg(1, graph.call("rms_norm", add.args[1], None, 1e-6))
    turned = apply(Rotate(online=True), graph).graph
    assert len(turned.calls("hadamard")) == 7  # three in each layer, and the head's input
    for figures in outliers.compare([graph, turned]).values():
        assert len(figures["before"]) == len(figures["after"]) == 2


def test_the_measure_is_largest_over_mean() -> None:
    graph = loud()
    assert graph.calibration is not None
    result = outliers.measure(graph, graph.calibration.tokens)
    probe = graph.clone()
    key = probe.calls("attention")[1].args[1]
    probe.output.args = (key,)
    text = graph.calibration.tokens
    keys = probe.run(text, torch.arange(24).expand_as(text).contiguous()).abs().amax((0, 1)).flatten()
    assert result[outliers.KEYS][1] == pytest.approx(float(keys.max() / keys.mean()), rel=1e-4)


def test_without_text_there_is_nothing_to_tell() -> None:
    graph = loud()
    graph.calibration = None
    assert outliers.compare([graph]) == {} == outliers.compare([])


def test_a_build_reports_them(tiny_checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "calib.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 60)
    out = tmp_path / "out"
    qcompile.build(str(tiny_checkpoint), out, recipe="qserve", calib=CalibrationSource(text, 2, 64))
    report = json.loads((out / "report.json").read_text())
    assert {len(side) for kind in report["outliers"].values() for side in kind.values()} == {2}
    page = report_page.page(report)
    assert "Outliers: keys" in page and "Outliers: block inputs" in page
