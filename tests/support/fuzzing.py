"""One seed of the graph fuzzer: a random decoder, compiled, against its reference bodies."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import qcompile
from qcompile import check, pipeline, recipes
from qcompile.errors import UnsupportedError
from qcompile.passes.base import run_passes
from qcompile.passes.schedule import configure
from tests.support.graphs import sequence_inputs, step_inputs
from tests.support.random_graphs import random_decoder

TOLERANCE = {"f32": 1e-5, "bf16": 3e-2}
"""Sums of float32 in another order, through a few layers; bf16 values that round the other way."""
FLIPS = 0.1
"""Where values are rounded to few levels, one that falls the other way moves logits by a step of that grid."""
PASSES = ("fold_norms", "rotate", "smooth", "center_keys", "smooth_attention", "reorder")


@dataclass(frozen=True)
class Outcome:
    """`right`, `refused` (with the reason) or `wrong`, and the errors that say so, relative to the largest logit."""

    verdict: str
    reason: str
    recipe: str
    errors: dict[str, float]
    drawn: dict[str, Any]


def settings(seed: int) -> tuple[str, dict[str, str]]:
    """Recipe and options of a seed: float32 for every second one, rewriting passes for half of all."""
    draw = random.Random(seed + 1_000_003)
    recipe = "f32" if draw.random() < 0.5 else draw.choice(list(recipes.RECIPES))
    options = {f"{name}.enabled": "true" for name in PASSES if draw.random() < 0.4}
    if draw.random() < 0.3:
        options |= {"rotate.enabled": "true", "rotate.online": "true"}
    return recipe, options


def examine(seed: int, folder: Path) -> Outcome:
    """Build seed's decoder into `folder` and compare. Whatever is not a refusal by name propagates: a crash."""
    graph, drawn = random_decoder(seed)
    recipe, options = settings(seed)
    drawn = drawn | {"options": options}
    try:
        pipeline.build(graph, folder, recipe=recipe, options=options)
    except UnsupportedError as error:
        return Outcome("refused", str(error), recipe, {}, drawn)
    passes = configure(recipes.get_recipe(recipe).settings(), options)
    step = run_passes(graph, passes[1:])[0][-1]
    ids, positions = sequence_inputs(23, vocab=graph.info.vocab_size, seed=seed)
    reference = step.run(*step_inputs(ids, None, step))[0].view(2, 23, -1)
    with qcompile.load(folder, threads=1 + seed % 2) as llm:
        logits = llm.logits(ids)
        stepwise = llm.logits(ids, chunk=5)
    errors = {
        "generated": check.max_relative_error(logits, reference),
        "rewritten": check.max_relative_error(logits, graph.run(ids, positions)),
        "stepwise": 0.0 if torch.equal(stepwise, logits) else check.max_relative_error(stepwise, logits),
    }
    right = errors["generated"] < TOLERANCE.get(recipe, FLIPS) and errors["stepwise"] == 0
    right = right and (recipe != "f32" or errors["rewritten"] < TOLERANCE["f32"])
    return Outcome("right" if right else "wrong", "", recipe, errors, drawn)
