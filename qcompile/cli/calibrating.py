"""The text on which weights are calibrated where the user gives none."""

from __future__ import annotations

from pathlib import Path

from qcompile import sample_text
from qcompile.checkpoints.tokenizer_sources import source_of
from qcompile.cli import console
from qcompile.recipe_files.resolved import Resolved


def text_for(recipe: Resolved, model: Path) -> Path | None:
    """The package's text for recipes that need one and checkpoints that can read it; says which, or why none."""
    if not recipe.calibrated:
        return None
    if source_of(model) is None:
        console.note(f"qcompile: recipe {recipe.name} wants a text, but {model} has no tokenizer: no calibration")
        return None
    console.note(f"qcompile: recipe {recipe.name} is calibrated on the package's sample text")
    return sample_text.FOLDER
