"""Allocation by salience per time: 8-bit features are as many as the target bits or perplexity permit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from qcompile.calibration import Calibration
from qcompile.errors import QualityError, UsageError
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import Pass, PassResult, apply
from qcompile.passes.calibration import salience, trial
from qcompile.passes.calibration.calibrate import Calibrate
from qcompile.passes.calibration.salience import Salience
from qcompile.passes.merge import Merge
from qcompile.passes.quantize import Quantize
from qcompile.recipes import get_recipe
from tests.support.graphs import decoder

MIXED = AssignPrecision("mix_4_8", "int8_g128", "f32", "f32")


def merged(precision: AssignPrecision = MIXED, samples: int = 6) -> Graph:
    graph = decoder(ffn=96)
    for rewrite in (precision, Merge()):
        graph = apply(rewrite, graph).graph
    text = torch.randint(0, 50, (samples, 24), generator=torch.Generator().manual_seed(3))
    graph.calibration = Calibration(text) if samples else None
    return graph


def bits(graph: Graph) -> float:
    """Mean bits per code, counted from the width of each feature."""
    total = weights = 0
    for node in graph.calls("quantize_mixed"):
        n, k = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        total += k * (4 * n + 4 * int(graph.evaluate(node)[3].sum()))
        weights += n * k
    return total / weights


@pytest.mark.parametrize("wanted", [4.0, 4.4, 8.0])
def test_codes_have_the_wanted_bits(wanted: float) -> None:
    result = apply(Salience(target_bits=wanted), merged())
    outcome = bits(apply(Quantize(), result.graph).graph)
    assert wanted - 0.1 < outcome <= wanted
    assert result.notes == (f"codes have {outcome:.3f} bits on average",)
    assert result.fired == sum(
        int(result.graph.weights[n.meta["precision"]["wide"]].sum())
        for n in result.graph.calls("linear", "gated_linear")
        if "wide" in n.meta["precision"]
    )


class Stated:
    """Replaces Trial: perplexity rises by a tenth for every bit below 8, plus 0.01."""

    def __init__(self, *_: object) -> None:
        pass

    def increase(self, graph: Graph) -> float:
        return 0.01 + 0.1 * (8 - bits(apply(Quantize(), graph).graph))


def test_a_limit_on_perplexity_takes_as_few_bits_as_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(salience, "Trial", Stated)
    result = apply(Salience(max_perplexity_increase=0.26), merged())
    outcome = bits(apply(Quantize(), result.graph).graph)
    assert 5.5 <= outcome < 5.7
    assert result.notes == (
        f"codes have {outcome:.3f} bits on average",
        f"perplexity of held-back calibration text rises by {0.01 + 0.1 * (8 - outcome):.4f}",
    )
    with pytest.raises(QualityError, match=r"8 bits wherever they may be raise perplexity by 0\.0100"):
        apply(Salience(max_perplexity_increase=0.005), merged())


@dataclass(frozen=True)
class Untried(Pass):
    """A pass that must not run."""

    name: ClassVar[str] = "untried"

    def run(self, graph: Graph) -> PassResult:
        raise AssertionError


def test_trials_are_kept_between_runs(tmp_path: Path) -> None:
    graph = apply(Salience(target_bits=5.0), merged()).graph
    graph.calibration = Calibration(graph.calibration.tokens, folder=tmp_path)  # type: ignore[union-attr]
    first = trial.Trial(graph, graph.calibration, (Quantize(), Calibrate())).increase(graph)
    again = trial.Trial(graph, graph.calibration, (Untried(),))
    assert again.increase(graph) == first


def test_loss_is_that_of_the_graph() -> None:
    graph = merged()
    assert graph.calibration is not None
    text = graph.calibration.tokens
    logits = graph.run(text, torch.arange(text.shape[1]).expand_as(text).contiguous())
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
    assert trial.loss(graph, text) == pytest.approx(float(expected), rel=1e-5)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="give --calib FILE"):
        apply(Salience(max_perplexity_increase=0.1), merged(samples=0))
    with pytest.raises(UsageError, match="take recipe auto or mixllm"):
        apply(Salience(target_bits=4.5), merged(AssignPrecision("w4_asym_g128", "int8", "f32", "f32")))
    with pytest.raises(UsageError, match="needs 2 samples"):
        apply(Salience(max_perplexity_increase=0.1), merged(samples=1))
    with pytest.raises(UsageError, match="target z80 is unknown"):
        Salience(target="z80")
    for wanted in (3.9, 8.1, -1.0, math.nan):
        with pytest.raises(UsageError, match=r"salience\.target_bits"):
            Salience(target_bits=wanted)
    for limit in (-0.1, math.inf, math.nan):
        with pytest.raises(UsageError, match=r"salience\.max_perplexity_increase"):
            Salience(max_perplexity_increase=limit)


def test_without_text_the_recipe_takes_the_share_its_bits_are() -> None:
    options = get_recipe("auto").settings()["salience"]
    result = apply(Salience(**options), merged(samples=0))  # type: ignore[arg-type]
    assert "no calibration text" in result.notes[0]
    assert bits(apply(Quantize(), result.graph).graph) == pytest.approx(4.4, abs=0.05)
