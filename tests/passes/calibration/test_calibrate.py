"""Calibrate: outputs of layers come closer to the float model's, and an interrupted run resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import qcompile
from qcompile.calibration import Calibration, CalibrationSource
from qcompile.errors import UsageError
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import apply
from qcompile.passes.cache import Cache
from qcompile.passes.calibration import calibrate
from qcompile.passes.calibration.calibrate import Calibrate
from qcompile.passes.calibration.sweep import Sweep
from qcompile.passes.merge import Merge
from qcompile.passes.quantize import Quantize
from tests.codegen.cpu.test_experts import decoder as decoder_of_experts
from tests.support.graphs import decoder, sequence_inputs

PRECISION = AssignPrecision("w4_asym_g128", "int8", "w8_sym_channel", "int8")


def tokens(samples: int = 12, length: int = 24, seed: int = 5) -> torch.Tensor:
    return torch.randint(0, 50, (samples, length), generator=torch.Generator().manual_seed(seed))


def quantized(precision: AssignPrecision = PRECISION) -> Graph:
    graph = decoder(hidden=64, ffn=96)
    for rewrite in (precision, Merge(), Quantize()):
        graph = apply(rewrite, graph).graph
    return graph


def error(graph: Graph) -> float:
    """Relative error of logits to the float model's, on text that calibration did not see."""
    inputs = sequence_inputs(16, 4)
    expected = decoder(hidden=64, ffn=96).run(*inputs)
    return float((graph.run(*inputs) - expected).norm() / expected.norm())


@pytest.mark.parametrize("format", ["w4_asym_g128", "qoq_g128", "qoq_channel", "mxfp4"])
def test_calibrated_models_are_nearer_to_the_float_model(format: str) -> None:
    plain = quantized(AssignPrecision(format, "int8", "f32", "f32"))
    plain.calibration = Calibration(tokens(32))
    result = apply(Calibrate(), plain)
    assert result.fired == 8
    assert error(result.graph) < 0.9 * error(plain)
    for node in result.graph.calls("quantize_weight"):
        if "calibrated" in node.meta:
            assert node.meta["calibrated"]["error"] <= node.meta["calibrated"]["error_nearest"]


@pytest.mark.parametrize("format", ["w4_asym_g128", "qoq_g128", "mix_4_8"])
def test_experts_are_calibrated_one_by_one(format: str) -> None:
    plain = float_graph = decoder_of_experts(hidden=64, inner=32)
    text = tokens(32)
    precision = apply(AssignPrecision(format, "int8_g128", "f32", "f32"), plain)
    mixed = format == "mix_4_8"
    assert ("experts have no kernel in mix_4_8" in "".join(precision.notes)) == mixed
    for rewrite in (Merge(), Quantize()):
        plain = apply(rewrite, precision.graph if plain is float_graph else plain).graph
    plain.calibration = Calibration(text)
    result = apply(Calibrate(), plain)
    experts = result.graph.calls("expert_gemm")
    assert len(experts) == 4 and result.fired == 7
    for node in experts:
        figures = node.args[2].meta["calibrated"]  # type: ignore[union-attr]
        assert figures["error"] < 0.95 * figures["error_nearest"]
        shapes = [tuple(part.shape) for part in plain.evaluate(plain_of(plain, node))]
        assert [tuple(part.shape) for part in result.graph.evaluate(node.args[2])] == shapes  # type: ignore[arg-type]
    inputs = sequence_inputs(16, 4)
    expected = float_graph.run(*inputs)
    errors = [float((g.run(*inputs) - expected).norm()) for g in (plain, result.graph)]
    assert errors[1] < errors[0]


def plain_of(graph: Graph, node: Any) -> Any:
    return next(other for other in graph.nodes if other.name == node.name).args[2]


@pytest.mark.parametrize("by_slot", [False, True])
def test_an_experts_moments_are_of_what_reaches_it(by_slot: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 3, (7, 2), generator=generator)  # expert 3 gets no token
    x = torch.randn(7, 2, 5, generator=generator) if by_slot else torch.randn(7, 5, generator=generator)
    result = list(calibrate.expert_moments([(x[:4], index[:4]), (x[4:], index[4:])], 4))
    wide = x if by_slot else x[:, None].expand(7, 2, 5)
    shared = torch.einsum("tki,tkj->ij", wide, wide) / 14
    torch.testing.assert_close(result[3], shared)
    for expert in range(3):
        own = wide[index == expert]
        torch.testing.assert_close(result[expert], (own.T @ own + 5 * shared) / (len(own) + 5))


def test_without_text_nothing_happens_and_a_note_says_so() -> None:
    graph = quantized()
    result = apply(Calibrate(), graph)
    assert result.fired == 0 and "no calibration text" in result.notes[0]
    assert result.graph is graph
    graph.calibration = Calibration(tokens())
    assert apply(Calibrate(clip=False, gptq=False), graph).fired == 0
    floats = quantized(AssignPrecision())
    floats.calibration = graph.calibration
    assert apply(Calibrate(), floats).fired == 0


def test_tokens_must_be_the_models() -> None:
    graph = quantized()
    graph.calibration = Calibration(tokens() + 1)
    with pytest.raises(UsageError, match="outside the model's vocabulary of 50"):
        apply(Calibrate(), graph)
    with pytest.raises(UsageError, match="damping"):
        Calibrate(damping=0.0)
    with pytest.raises(UsageError, match="descent"):
        Calibrate(descent=-1)


def test_a_sweep_gives_what_the_graph_computes() -> None:
    graph = quantized()
    text = tokens(3, 9)
    gemm = graph.calls("gemm")[5]
    sweep = Sweep(graph, text)
    for stop in (graph.calls("gemm")[2], gemm):
        sweep.advance(stop)
    seen = sweep.values(gemm.args[0])  # type: ignore[arg-type]
    probe = graph.clone()
    copied = probe.calls("gemm")[5].args[0]
    probe.output.args = (copied,)
    for row, parts in zip(text, seen, strict=True):
        expected = probe.run(row[None], torch.arange(9)[None])
        assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))


@pytest.mark.parametrize("made", [quantized, lambda: decoder_of_experts(hidden=64, inner=32)])
def test_a_sweep_may_stop_anywhere(made: Callable[[], Graph]) -> None:
    """Values of all samples reuse memory: none may be overwritten before it is read."""
    graph, text = made(), tokens(3, 9)
    sweep = Sweep(graph, text)
    for node in graph.nodes:
        if node.op == "call_function" and not graph.is_weight(node):
            sweep.advance(node)
    for row, logits in zip(text, sweep.outputs(), strict=True):
        assert torch.equal(logits, graph.run(row[None], torch.arange(9)[None]))


def test_an_interrupted_run_resumes_to_the_same_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folder: Path | None) -> Graph:
        graph = quantized()
        graph.calibration = Calibration(tokens(), folder=folder)
        return apply(Calibrate(), graph).graph

    whole, seen, resumable = run(None), [], False
    choose = calibrate.gptq.choose

    def interrupted(*args: object, **options: object) -> object:
        seen.append(args)
        if len(seen) == 4 and not resumable:
            raise KeyboardInterrupt
        return choose(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(calibrate.gptq, "choose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    resumable = True
    kept = sorted(tmp_path.iterdir())
    assert len(kept) == 3
    kept[1].write_bytes(kept[1].read_bytes()[:-9])  # truncated: computed again
    resumed = run(tmp_path)
    assert len(seen) == 4 + 6 + 1  # 9 weights: 2 were kept completely
    for a, b in zip(whole.calls("quantize_weight"), resumed.calls("quantize_weight"), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(whole.evaluate(a), resumed.evaluate(b), strict=True))
    seen.clear()
    run(tmp_path)
    assert not seen  # all kept: nothing is computed twice
    graph = quantized()
    graph.calibration = Calibration(tokens(seed=6), folder=tmp_path)
    apply(Calibrate(), graph)
    assert len(seen) == 9  # other text, other codes


def test_a_build_says_what_it_saw_and_is_reproducible(tiny_checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "calib.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 60)
    hashes = set()
    for _ in range(2):
        out = tmp_path / "out"
        report = qcompile.build(str(tiny_checkpoint), out, recipe="w4a8", calib=CalibrationSource(text, 4, 64))
        manifest = json.loads((out / "qcompile.json").read_text())
        hashes.add(manifest["sha256"])
    assert len(hashes) == 1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert manifest["calibration"]["samples"] == 4 and manifest["calibration"]["source"] == "calib.txt"
    assert next(p.fired for p in report.passes if p.name == "calibrate") == 9
    qcompile.load(out).close()


def test_an_interrupted_build_resumes_to_the_same_bytes(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "calib.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 60)

    def build(name: str) -> dict[str, bytes]:
        out = tmp_path / name
        options = {"salience.samples": "2"}
        qcompile.build(
            str(tiny_checkpoint), out, recipe="mixllm", options=options, calib=CalibrationSource(text, 4, 64)
        )
        return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}

    whole, done, choose = build("whole"), 0, calibrate.gptq.choose

    def interrupted(*args: object, **options: object) -> object:
        nonlocal done
        done += 1
        if done == 8 + 4:  # salience calls it for eight weights
            raise KeyboardInterrupt
        return choose(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(calibrate.gptq, "choose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build("out")
    assert not (tmp_path / "out").exists()
    kept = {path.name: path.read_bytes() for path in (tmp_path / ".out.calibration").iterdir()}
    assert len(kept) == 4  # salience, and three weights
    assert build("out") == whole
    assert done == 8 + 4 + 6  # nine weights: three were kept
    assert not (tmp_path / ".out.calibration").exists()


def test_calibrated_weights_survive_the_step_passes() -> None:
    graph = quantized()
    graph.calibration = Calibration(tokens())
    result = apply(Calibrate(), graph).graph
    step = apply(Cache("kv32"), result).graph
    assert step.calibration is graph.calibration
    first, second = (g.calls("quantize_weight")[0] for g in (result, step))
    assert all(torch.equal(a, b) for a, b in zip(result.evaluate(first), step.evaluate(second), strict=True))
