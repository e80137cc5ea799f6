"""What the float model has where rounded layers changed it, and weights that bring it back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qcompile.calibration import Calibration
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import apply
from qcompile.passes.calibration import origin
from qcompile.passes.calibration.calibrate import Calibrate
from qcompile.passes.merge import Merge
from qcompile.passes.quantize import Quantize
from tests.codegen.cpu.test_experts import decoder as decoder_of_experts
from tests.support.cases import first
from tests.support.graphs import decoder, sequence_inputs


def deep(layers: int = 4) -> Graph:
    return decoder(hidden=64, ffn=96, layers=layers)


def quantized(graph: Graph, weight: str, activation: str) -> Graph:
    for rewrite in (AssignPrecision(weight, activation, "f32", "f32"), Merge(), Quantize()):
        graph = apply(rewrite, graph).graph
    return graph


def calibrated(graph: Graph, restore: bool) -> Graph:
    text = torch.randint(0, 50, (32, 24), generator=torch.Generator().manual_seed(5))
    graph.calibration = Calibration(text)
    return apply(Calibrate(restore=restore), graph).graph


@pytest.mark.parametrize("made", [deep, decoder_of_experts])
@pytest.mark.parametrize(
    ("weight", "activation"), [("w4_asym_g128", "int8"), ("mix_4_8", "int8_g128"), ("nested_4", "int8_g128")]
)
def test_what_is_unrounded_is_the_float_model(made: Callable[[], Graph], weight: str, activation: str) -> None:
    if made is decoder_of_experts and weight == "nested_4":
        weight = "nested_8_4"
    rounded, inputs = quantized(made(), weight, activation), sequence_inputs(16, 4)
    expected = made().run(*inputs)
    torch.testing.assert_close(origin.unrounded(rounded).run(*inputs), expected)
    assert not torch.allclose(rounded.run(*inputs), expected, rtol=1e-3, atol=1e-3)


def drifted(tokens: int, k: int = 48, noise: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, k], and what rounded layers made of it: mixed a little, and noise."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.eye(k) + 0.3 * torch.randn(k, k, generator=generator) / k**0.5
    x = torch.randn(tokens, k, generator=generator)
    return x, x @ mixed.T + noise * torch.randn(tokens, k, generator=generator)


def test_what_layers_ahead_changed_is_made_up_for() -> None:
    x, changed = drifted(4000)
    seen, exact = ([[part] for part in value[:2000].split(500)] for value in (changed, x))
    result = origin.restoring(seen, exact, 0.01)
    back, other = changed[2000:] @ result.T, x[2000:]
    assert (back - other).norm() < 0.45 * (changed[2000:] - other).norm()
    torch.testing.assert_close(origin.restoring([[x]], [[x]], 0.01), torch.eye(48))


def test_inputs_that_are_not_finite_are_refused() -> None:
    x, changed = drifted(100)
    changed[0, 0] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        origin.restoring([[changed]], [[x]], 0.01)


def test_more_samples_may_be_seen_than_the_float_model_looks_at() -> None:
    x, changed = drifted(2000)
    few = origin.restoring([[changed[:1000]]], [[x[:1000]]], 0.01)
    assert torch.equal(origin.restoring([[changed[:1000]], [changed[1000:]]], [[x[:1000]]], 0.01), few)


def test_little_is_made_up_for_by_few_tokens() -> None:
    x, changed = drifted(1024, noise=1.0)
    result = origin.restoring([[changed[:24]]], [[x[:24]]], 0.01)
    assert (changed[24:] @ result.T - x[24:]).norm() < (changed[24:] - x[24:]).norm()
    torch.testing.assert_close(origin.restoring([[0 * x]], [[x]], 0.01), torch.eye(48))
    assert torch.equal(origin.restoring([[changed[:1]]], [[x[:1]]], 0.01), torch.eye(48))


@pytest.mark.parametrize("samples", [1, 8])
def test_what_no_linear_brings_back_is_left(samples: int) -> None:
    seen = torch.randn(400, 48, generator=torch.Generator().manual_seed(1))
    was = seen + torch.randn(400, 48, generator=torch.Generator().manual_seed(2))
    result = origin.restoring(*([[part] for part in rows.chunk(samples)] for rows in (seen, was)), 0.01)
    assert (result - torch.eye(48)).norm() < 0.5  # regression alone, which sees patterns in noise, gives 2.4


@pytest.mark.parametrize(
    ("weight", "activation"),
    first((("qoq_g128", "int8"),), [("w4_asym_g128", "bf16"), ("qoq_g128", "int8"), ("w4_asym_g128", "int4")]),
)
def test_restored_models_are_nearer_to_the_float_model(weight: str, activation: str) -> None:
    rounded, inputs = quantized(deep(), weight, activation), sequence_inputs(16, 8)
    expected = deep().run(*inputs)
    without, restored = (float((calibrated(rounded, on).run(*inputs) - expected).norm()) for on in (False, True))
    assert restored < 0.95 * without


def changed_weights(rounded: Graph) -> list[bool]:
    """Of each weight that is calibrated, whether its codes are others when it is restored."""
    graphs = [calibrated(rounded, on) for on in (False, True)]
    pairs = zip(*(graph.calls("quantize_weight") for graph in graphs), strict=True)
    result = [(graphs[0].evaluate(a), graphs[1].evaluate(b)) for a, b in pairs if "calibrated" in a.meta]
    return [not all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) for a, b in result]


def test_weights_of_two_planes_are_not_restored() -> None:
    assert all(changed_weights(quantized(deep(2), "w4_asym_g128", "int8")))
    # Eight bits stand behind eight bits: what the upper nibbles ahead lose is not theirs to make up for.
    assert not any(changed_weights(quantized(deep(2), "nested_8_4", "int8_g128")))


def test_the_float_model_sees_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, text = quantized(deep(), "w4_asym_g128", "int8"), torch.zeros(8, 10, dtype=torch.int64)
    monkeypatch.setattr(origin, "TOKENS", 35)
    beside, gemm = origin.Origin(graph, text), graph.calls("gemm")[2]
    beside.advance(gemm)
    assert [tuple(parts[0].shape) for parts in beside.values(gemm)] == 3 * [(1, 10, 64)]
