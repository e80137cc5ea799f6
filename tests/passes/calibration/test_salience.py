"""Salience: block-wise gradients equal the model's own, and the most salient features get 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qcompile import ops
from qcompile.calibration import Calibration
from qcompile.errors import UsageError
from qcompile.formats.mixed import EIGHT_BIT_ZERO
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import apply
from qcompile.passes.calibration import gptq, gradients
from qcompile.passes.calibration.calibrate import Calibrate
from qcompile.passes.calibration.salience import Salience
from qcompile.passes.merge import Merge
from qcompile.passes.quantize import Quantize
from tests.support.graphs import decoder, sequence_inputs

PRECISION = AssignPrecision("mix_4_8", "int8_g128", "f32", "f32")


def tokens(samples: int = 3, length: int = 11) -> Tensor:
    return torch.randint(0, 50, (samples, length), generator=torch.Generator().manual_seed(3))


def merged() -> Graph:
    graph = decoder(ffn=96, bias="q")
    for rewrite in (PRECISION, Merge()):
        graph = apply(rewrite, graph).graph
    return graph


def rounding_error(w: Tensor, moments: Tensor | None = None) -> Tensor:
    return weight_format("w4_asym_g128").dequantize(weight_format("w4_asym_g128").quantize(w), w.shape[1]) - w


def gradient(graph: Graph, row: Tensor, weights: dict[Any, Tensor]) -> list[Tensor]:
    """dloss/dW of every linear's weight, from running the whole graph at once."""
    values: dict[Any, Any] = dict(zip(graph.inputs, (row[None], torch.arange(len(row))[None]), strict=True))
    values |= weights
    for node in graph.nodes:
        if node.op == "call_function" and not graph.is_weight(node):
            given = torch.fx.node.map_arg(node.args, lambda n: values[n] if n in values else graph.evaluate(n))
            values[node] = ops.reference(str(ops.name_of(node.target)))(*given)
    logits = values[graph.output.args[0]]
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], row[1:])
    return list(torch.autograd.grad(loss, list(weights.values())))


def test_streamed_gradients_are_the_whole_models(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = merged()
    linears = [node for node in graph.calls("linear", "gated_linear") if node.meta["precision"]["weight"] == "mix_4_8"]
    assert len(linears) == 8
    text = tokens()
    moved = gradients.first_order(graph, text, dict.fromkeys(linears, rounding_error), lambda: None)
    assert gradients._plan(5, 100, 3) == (5, 3)
    monkeypatch.setattr(gradients, "KEPT_BYTES", 1)  # one sample at a time, and two of five cuts are kept
    assert gradients._plan(5, 100, 3) == (3, 1)
    again = gradients.first_order(graph, text, dict.fromkeys(linears, rounding_error), lambda: None)
    weights = {node.args[1]: graph.evaluate(node.args[1]).requires_grad_() for node in linears}  # type: ignore[arg-type]
    for index, row in enumerate(text):
        for node, slope in zip(linears, gradient(graph, row, weights), strict=True):
            expected = (slope * rounding_error(weights[node.args[1]].detach())).sum(1)
            torch.testing.assert_close(moved[node][index], expected, rtol=1e-3, atol=1e-8)
            assert torch.equal(moved[node][index], again[node][index])


def test_changes_see_the_moments_of_inputs() -> None:
    graph = merged()
    linears = [node for node in graph.calls("linear", "gated_linear") if node.meta["precision"]["weight"] == "mix_4_8"]
    text, result = tokens(), {}

    def change(node: Any) -> Any:
        def noted(w: Tensor, moments: Tensor | None) -> Tensor:
            result[node] = moments
            return rounding_error(w)

        return noted

    gradients.first_order(graph, text, {node: change(node) for node in linears}, lambda: None, seen=2)
    for node in linears:
        probe = graph.clone()
        probe.output.args = (next(n for n in probe.nodes if n.name == node.name).args[0],)
        x = torch.cat([probe.run(row[None], torch.arange(11)[None])[0] for row in text[:2]])
        torch.testing.assert_close(result[node], gptq.trusted(x.T @ x / len(x), len(x)), rtol=1e-4, atol=1e-6)


def test_salience_is_of_the_error_that_gptq_leaves() -> None:
    marks = []
    for compensated in (False, True):
        graph = merged()
        graph.calibration = Calibration(tokens(24, 24))
        result = apply(Salience(enabled=True, fraction=0.25, compensated=compensated), graph)
        linears = [n for n in result.graph.calls("linear", "gated_linear") if "wide" in n.meta["precision"]]
        marks.append(torch.cat([result.graph.weights[n.meta["precision"]["wide"]] for n in linears]))
    assert int(marks[0].sum()) == int(marks[1].sum()) and not torch.equal(*marks)


def test_the_graph_is_cut_at_the_residual_stream() -> None:
    parts = gradients.stretches(merged())
    assert [sum(ops.name_of(n.target) in gradients.LINEARS for n in part) for part in parts] == [2, 2, 2, 2, 1]
    assert all(ops.name_of(part[-1].target) == "add" for part in parts[:-1])


def test_the_most_salient_features_get_eight_bits(tmp_path: Path) -> None:
    graph = merged()
    graph.calibration = Calibration(tokens(), folder=tmp_path)
    result = apply(Salience(enabled=True, fraction=0.25), graph)
    linears = [n for n in result.graph.calls("linear", "gated_linear") if "wide" in n.meta["precision"]]
    marks = torch.cat([result.graph.weights[n.meta["precision"]["wide"]] for n in linears])
    assert result.fired == int(marks.sum()) == round(0.25 * len(marks))
    kept = result.graph.calibration.kept(next(tmp_path.iterdir()).stem)  # type: ignore[union-attr]
    assert kept is not None
    scores = torch.cat(kept[0])
    assert float(scores[marks].min()) >= float(scores[~marks].max())
    assert len({int(result.graph.weights[n.meta["precision"]["wide"]].sum()) for n in linears}) > 1  # ranked together
    rounded = apply(Quantize(), result.graph).graph
    for weight, linear in zip(rounded.calls("quantize_mixed"), linears, strict=True):
        wide = result.graph.weights[linear.meta["precision"]["wide"]]
        assert torch.equal(rounded.evaluate(weight)[3], wide)


def test_clipping_and_gptq_work_on_both_parts() -> None:
    graph = merged()
    graph.calibration = Calibration(tokens(24, 24))
    plain = apply(Quantize(), apply(Salience(enabled=True), graph).graph).graph
    chosen = apply(Calibrate(), plain).graph
    inputs = sequence_inputs(16, 4)
    expected = decoder(ffn=96, bias="q").run(*inputs)
    errors = [float((g.run(*inputs) - expected).norm()) for g in (plain, chosen)]
    assert errors[1] < 0.9 * errors[0]
    for a, b in zip(plain.calls("quantize_mixed"), chosen.calls("quantize_mixed"), strict=True):
        before, after = plain.evaluate(a), chosen.evaluate(b)
        wide = before[3]
        assert torch.equal(after[3], wide) and bool((after[2][wide] == EIGHT_BIT_ZERO).all())
        assert int(after[0][~wide].max()) <= 15 and bool((after[0][wide] >= 1).all())


def test_without_text_the_share_is_taken_of_every_linear() -> None:
    result = apply(Salience(enabled=True, fraction=0.5), merged())
    assert "no calibration text" in result.notes[0]
    rounded = apply(Quantize(), result.graph).graph
    for weight in rounded.calls("quantize_mixed"):
        wide = rounded.evaluate(weight)[3]
        assert int(wide.sum()) == round(0.5 * len(wide))
    other = apply(Merge(), apply(AssignPrecision(), decoder()).graph).graph
    assert apply(Salience(enabled=True), other).fired == 0


@pytest.mark.parametrize("fraction", [-0.01, 1.01, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(UsageError, match=r"salience\.fraction"):
        Salience(fraction=fraction)


def test_what_is_kept_at_cuts_stays_within_its_limit() -> None:
    limit = gradients.KEPT_BYTES
    for parts, cut, samples in ((17, 2 << 20, 32), (45, 8 << 20, 32), (161, 32 << 20, 32), (3, limit, 5)):
        each, together = gradients._plan(parts, cut, samples)
        kept = parts if each == parts else each + -(-parts // each)
        assert kept * cut * together <= limit or together == 1
    assert gradients._plan(45, 8 << 20, 32) == (7, 16)  # a 1.1 B model: two batches instead of sixteen
