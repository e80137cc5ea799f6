"""The whole way on a tiny model: a checkpoint goes in, tokens come out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import qcompile
from qcompile.recipes import RECIPES
from tests.support.cases import first

Build = Callable[[str], Path]


# test_every_recipe.py has all; test_speculation.py and test_quantspec.py build this model with drafts.
@pytest.mark.parametrize("recipe", first(("auto", "mixllm"), RECIPES))
def test_every_recipe_generates(recipe: str, tiny_artifact: Build) -> None:
    with qcompile.load(tiny_artifact(recipe), threads=2) as llm:
        sample = llm.generate("def main(", max_tokens=8, temperature=0)[0].outputs[0]
    assert len(sample.token_ids) == 8 and sample.finish_reason == "length"


def test_f32_is_the_model(tiny_checkpoint: Path, tiny_artifact: Build) -> None:
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor([[0, 17, 4000, 255, 12, 12, 8191, 3], [5, 6, 7, 8, 9, 10, 11, 12]])
    with torch.no_grad(), qcompile.load(tiny_artifact("f32")) as llm:
        want = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)(tokens).logits
        assert (llm.logits(tokens) - want).abs().max() < 2e-4


def test_an_artifact_needs_no_torch_to_generate(tiny_artifact: Build) -> None:
    code = "import sys, qcompile; qcompile.load(sys.argv[1]).generate('x = '); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(tiny_artifact("w4a8"))]).returncode == 0
