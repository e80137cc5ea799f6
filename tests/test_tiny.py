"""The whole way on a tiny model: a checkpoint goes in, tokens come out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import qcompile
from qcompile import pipeline
from qcompile.recipes import RECIPES

Build = Callable[[str], Path]
TOKENS = [[0, 17, 4000, 255, 12, 12, 8191, 3], [5, 6, 7, 8, 9, 10, 11, 12]]


def reference_logits(checkpoint: Path) -> torch.Tensor:
    """transformers' float32 logits [2, 8, vocab] of TOKENS."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)(torch.tensor(TOKENS)).logits


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_generates(recipe: str, tiny_artifact: Build) -> None:
    with qcompile.load(tiny_artifact(recipe), threads=2) as llm:
        sample = llm.generate("def main(", max_tokens=8, temperature=0)[0].outputs[0]
    assert len(sample.token_ids) == 8 and sample.finish_reason == "length"


def test_f32_is_the_model(tiny_checkpoint: Path, tiny_artifact: Build) -> None:
    with qcompile.load(tiny_artifact("f32")) as llm:
        difference = llm.logits(TOKENS) - reference_logits(tiny_checkpoint)
    assert difference.abs().max() < 2e-4


def step_logits(checkpoint: Path, recipe: str, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of the last graph's reference bodies, through a cache of one page."""
    plan = pipeline.plan(str(checkpoint), recipe=recipe)
    kv, rows = plan.program.kv, torch.arange(len(tokens))
    cache = torch.zeros(kv.layers, 2, kv.page_tokens, kv.kv_heads, kv.head_dim)
    table = torch.zeros(1, 1, dtype=torch.int64)
    return plan.graphs[-1].run(torch.tensor(tokens), rows, torch.zeros_like(rows), table, rows, cache)[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_compute_what_the_graph_says(recipe: str, tiny_checkpoint: Path, tiny_artifact: Build) -> None:
    want = step_logits(tiny_checkpoint, recipe, TOKENS[0])
    with qcompile.load(tiny_artifact(recipe)) as llm:
        error = (llm.logits(TOKENS[:1])[0] - want).norm() / want.norm()
    assert error < 1e-3  # a sum in another order may move one activation across a rounding edge


@pytest.mark.parametrize("recipe", ["w4a8", "qserve", "bf16"])
def test_a_token_does_not_depend_on_its_step(recipe: str, tiny_artifact: Build) -> None:
    with qcompile.load(tiny_artifact(recipe), threads=1) as one, qcompile.load(tiny_artifact(recipe), threads=2) as two:
        whole = one.logits(TOKENS)
        for chunk in (1, 2, 3, 5):
            assert torch.equal(one.logits(TOKENS[:1], chunk=chunk), whole[:1])
        assert torch.equal(two.logits(TOKENS[1:]), whole[1:])


def test_two_builds_are_the_same_bytes(tiny_checkpoint: Path, tiny_artifact: Build, tmp_path: Path) -> None:
    def digests(root: Path) -> dict[str, str]:
        files = [path for path in root.rglob("*") if path.is_file()]
        return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    qcompile.build(str(tiny_checkpoint), tmp_path / "again", recipe="w4a8")
    assert digests(tmp_path / "again") == digests(tiny_artifact("w4a8"))
