"""Calibrated recipes on other decoder families: every one comes nearer to its float model than by rounding alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import qcompile
from benchmarks import families, family_list
from qcompile import recipes
from qcompile.calibration import Calibration
from qcompile.checkpoints import frontend
from qcompile.passes.base import apply
from qcompile.passes.schedule import PASSES, configure
from tests.support.cases import first

FAMILIES = (
    "qwen3",  # norms of queries and keys
    "phi",  # biases, a part of each head rotated, attention and MLP side by side
    "gemma2, soft caps",  # norms behind blocks: nothing to rotate
    "opt",  # learned positions, layer norms with biases
    "mixtral",  # experts
)
PAIRS = [(family, recipe) for family in FAMILIES for recipe in ("qserve", "mixllm")]
FIRST = (
    ("qwen3", "qserve"),
    ("phi", "mixllm"),
)
KINDS = {name: (kind, settings) for name, kind, settings in family_list.FAMILIES}


def text(vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (16, 64), generator=torch.Generator().manual_seed(7))


def off(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("family") / "model"
    with families.quiet():
        families.save_random(*KINDS[request.param], folder)
    return request.param, folder


@pytest.mark.parametrize(("checkpoint", "recipe"), first(FIRST, PAIRS), indirect=["checkpoint"], scope="module")
def test_calibration_brings_every_family_nearer(checkpoint: tuple[str, Path], recipe: str) -> None:
    graph = frontend.load(checkpoint[1])
    ids, positions = families.tokens(2, 24, graph.info.vocab_size), torch.arange(24).expand(2, 24)
    expected = apply(PASSES[0](), graph).graph.run(ids, positions)
    errors: list[float] = []
    for calibrated in (False, True):
        made: Any = graph.clone()
        made.calibration = Calibration(text(graph.info.vocab_size)) if calibrated else None
        passes = configure(recipes.get_recipe(recipe).settings("f32"), {"salience.samples": "4"})
        for rewrite in passes:
            if rewrite.name == "cache":
                break
            made = apply(rewrite, made).graph if rewrite.wanted else made
        errors.append(off(made.run(ids, positions), expected))
    assert errors[1] < 0.95 * errors[0] < 0.5, (checkpoint[0], recipe, errors)


def test_a_few_lines_of_text_make_nothing_worse(tmp_path: Path) -> None:
    """Fewer tokens than a layer has inputs, of two dozen kinds: what they do not show must not be given up."""
    with families.quiet():
        families.save_random(*KINDS["gemma2, soft caps"], tmp_path / "model")
    graph = frontend.load(tmp_path / "model")
    ids, positions = families.tokens(2, 24, graph.info.vocab_size), torch.arange(24).expand(2, 24)
    expected = apply(PASSES[0](), graph).graph.run(ids, positions)
    lines = torch.arange(4 * 32).view(4, 32) * 7 % 23 + 5
    for recipe in ("w4a16", "mixllm"):
        errors = []
        for calibration in (None, Calibration(lines)):
            made: Any = graph.clone()
            made.calibration = calibration
            for rewrite in configure(recipes.get_recipe(recipe).settings("f32"), {"salience.samples": "4"}):
                if rewrite.name == "cache":
                    break
                made = apply(rewrite, made).graph if rewrite.wanted else made
            errors.append(off(made.run(ids, positions), expected))
        assert errors[1] < errors[0], (recipe, errors)


def test_a_mixture_of_experts_is_built_under_mixllm(tmp_path: Path) -> None:
    with families.quiet():
        reference = families.save_random(*KINDS["mixtral"], tmp_path / "model")
    vocabulary = reference.config.vocab_size
    options = {"salience.samples": "4"}
    built = qcompile.build(
        tmp_path / "model", tmp_path / "out", recipe="mixllm", options=options, head_dtype="f32", calib=text(vocabulary)
    )
    notes = {record.name: record.notes for record in built.passes}
    assert notes["assign_precision"] == ("experts have no kernel in mix_4_8: theirs are w4_asym_g128",)
    ids = families.tokens(2, 24, vocabulary)
    with qcompile.load(tmp_path / "out") as llm, torch.no_grad():
        assert off(llm.logits(ids), reference(ids).logits) < 0.25
