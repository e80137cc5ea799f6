"""LearnRounding: logits come nearer to the float model's, and never by the loss of what calibration chose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qcompile import ops
from qcompile.calibration import Calibration
from qcompile.errors import PassError, ResourceError, UsageError
from qcompile.formats.registry import weight_format
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import apply
from qcompile.passes.calibration import learn_rounding
from qcompile.passes.calibration.calibrate import Calibrate
from qcompile.passes.calibration.learn_rounding import LearnRounding
from qcompile.passes.calibration.learned import LearnedWeight
from qcompile.passes.merge import Merge
from qcompile.passes.quantize import Quantize
from tests.codegen.cpu.test_experts import decoder as decoder_of_experts
from tests.passes.calibration.test_calibrate import quantized, tokens
from tests.support.graphs import decoder

FAST = LearnRounding(enabled=True, steps=40, rate=0.01, scale_rate=0.001)


@pytest.fixture(autouse=True)
def one_sample_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn_rounding, "STEP_TOKENS", 128)


def text(samples: int = 6) -> torch.Tensor:
    """Samples that are all alike, so that what is learned on some holds for the one that judges."""
    return tokens(1, 128).repeat(samples, 1)


def calibrated(weight: str = "w4_asym_g128", activation: str = "bf16", head: str = "f32", samples: int = 6) -> Graph:
    graph = quantized(AssignPrecision(weight, activation, head, "f32" if head == "f32" else "int8"))
    graph.calibration = Calibration(text(samples))
    return apply(Calibrate(gptq=False), graph).graph


def divergence(graph: Graph) -> float:
    """Mean divergence of the graph's logits from the float model's on the text."""
    inputs = (text(1), torch.arange(128)[None])
    given, wanted = (one.run(*inputs).log_softmax(-1).flatten(0, 1) for one in (graph, decoder(hidden=64, ffn=96)))
    return float(torch.nn.functional.kl_div(given, wanted, reduction="batchmean", log_target=True))


def parts_of(graph: Graph) -> list[torch.Tensor]:
    return [part for node in graph.calls("quantize_weight") for part in graph.evaluate(node)]


def same(graph: Graph, other: Graph) -> bool:
    return all(map(torch.equal, parts_of(graph), parts_of(other)))


@pytest.mark.parametrize(
    "weight, activation", [("w4_asym_g128", "bf16"), ("w3_asym_g128", "bf16"), ("qoq_channel", "int8")]
)
def test_logits_come_nearer_to_the_float_model(weight: str, activation: str) -> None:
    graph = calibrated(weight, activation)
    result = apply(FAST, graph)
    assert result.fired == 8 and "divergence from the float model" in result.notes[-1]
    assert divergence(result.graph) < 0.9 * divergence(graph)
    assert same(apply(FAST, graph).graph, result.graph)
    for node in result.graph.calls("quantize_weight"):
        layout = [(tuple(part.shape), part.dtype) for part in result.graph.evaluate(node)]
        shape = tuple(ops.operand(node, "w").meta["val"].shape)
        assert layout == [(tuple(of), dtype) for of, dtype in weight_format(ops.operand(node, "format")).layout(shape)]


def test_of_trellis_codes_the_scales_learn() -> None:
    graph = calibrated("w2_trellis_g128", "bf16")
    result = apply(replace(FAST, scale_rate=0.004), graph)
    assert result.fired == 8 and "divergence from the float model" in result.notes[-1]
    assert divergence(result.graph) < 0.95 * divergence(graph)
    pairs = list(zip(parts_of(graph), parts_of(result.graph), strict=True))
    codes, scales = pairs[::2], pairs[1::2]
    assert all(torch.equal(before, after) for before, after in codes)
    assert not all(torch.equal(before, after) for before, after in scales)


def test_what_learns_nothing_stays_as_calibrated() -> None:
    graph = calibrated()
    result = apply(replace(FAST, rate=0.0, scale_rate=0.0, steps=1), graph)
    assert result.fired == 0 and "diverges no less" in result.notes[-1]
    assert same(graph, result.graph)


def test_an_interrupted_run_resumes_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = calibrated()
    whole = apply(FAST, graph).graph
    graph.calibration = Calibration(text(), folder=tmp_path)
    steps: list[int] = []
    loss = learn_rounding._Lesson._loss

    def counted(self: learn_rounding._Lesson, *given: Any) -> torch.Tensor:
        steps.append(1)
        if len(steps) == 15:
            raise KeyboardInterrupt
        return loss(self, *given)

    monkeypatch.setattr(learn_rounding._Lesson, "_loss", counted)
    with pytest.raises(KeyboardInterrupt):
        apply(FAST, graph)
    resumed = apply(FAST, graph).graph
    assert same(whole, resumed)
    assert len(steps) < 15 + FAST.steps + 2
    before = len(steps)
    assert same(whole, apply(FAST, graph).graph) and len(steps) == before


def test_a_draft_leaves_the_weights_it_shares() -> None:
    learned = apply(FAST, calibrated()).graph
    again = apply(FAST, learned)
    assert again.fired == 0 and same(learned, again.graph)
    assert again.notes == ("no weight has codes on an integer grid that calibration chose",)


def test_what_cannot_learn_is_refused_with_the_reason() -> None:
    rounded = quantized()
    assert "no calibration text" in apply(FAST, rounded).notes[0]
    rounded.calibration = Calibration(text())
    assert "no weight has codes" in apply(FAST, rounded).notes[0]
    assert "one sample" in apply(FAST, calibrated(samples=1)).notes[0]
    others = apply(replace(FAST, rate=0.0), calibrated("mxfp4", "int8", "w8_sym_channel"))
    assert others.fired == 1 and "8 weights are in formats without integer grids" in others.notes[0]


def test_experts_are_left_with_the_reason() -> None:
    graph = decoder_of_experts()
    for rewrite in (AssignPrecision("w4_asym_g128", "int8", "w8_sym_channel", "int8"), Merge(), Quantize()):
        graph = apply(rewrite, graph).graph
    graph.calibration = Calibration(text(4) % 10)
    result = apply(FAST, graph)
    assert result.fired == 0 and "gradients do not pass expert_gemm" in result.notes[0]


def test_logits_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    value = LearnedWeight.value
    monkeypatch.setattr(LearnedWeight, "value", lambda self: value(self) * float("inf"))
    with pytest.raises(PassError, match="not finite"):
        apply(FAST, calibrated())


def test_too_little_memory_is_refused_with_the_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = calibrated()
    moved = [node for node in graph.calls("quantize_weight") if "calibrated" in node.meta]
    weights = sum(ops.operand(node, "w").meta["val"].numel() for node in moved)
    monkeypatch.setattr(learn_rounding, "available_memory", lambda: 30 * weights - 1)
    with pytest.raises(ResourceError, match=f"needs {30 * weights:,} bytes of memory for {weights:,} weights"):
        apply(FAST, graph)


@pytest.mark.parametrize("field, value", [("steps", 0), ("rate", -0.1), ("scale_rate", 1.0), ("rate", float("nan"))])
def test_bad_options(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=field):
        LearnRounding(**{field: value})  # type: ignore[arg-type]
