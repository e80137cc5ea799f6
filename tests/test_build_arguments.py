"""What `qcompile.build` is given from Python: what fits no model, or no type, is refused, never ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import qcompile
from qcompile import pipeline
from qcompile.errors import UsageError
from tests.graphs import decoder


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_position": 64}, "max_position are for modules"),
        ({"example_inputs": ()}, "max_position are for modules"),
        ({"options": {"rotate.enabled": None}}, "rotate.enabled must be a text, a number, True or False, not None"),
        ({"drafts": "nowhere"}, "^nowhere is not a checkpoint directory"),
        ({"drafts": Path("nowhere")}, "^nowhere is not a checkpoint directory"),
        ({"calib": ["a text"]}, "calibration takes a file of text or token ids .*, not list"),
    ],
)
def test_arguments_without_a_meaning(given: Any, message: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        qcompile.build(str(tiny_checkpoint), tmp_path / "out", **given)
    assert not list(tmp_path.iterdir())


def test_a_graph_was_imported_already() -> None:
    with pytest.raises(UsageError, match="max_position is for what is imported"):
        pipeline.plan(decoder(layers=1), max_position=64)


def test_options_are_the_same_however_they_are_written() -> None:
    written, meant = (
        [record.facts for record in pipeline.plan(decoder(layers=1), options={"rotate.enabled": on}).passes]
        for on in ("true", True)
    )
    assert written == meant and "rotate" in [entry["name"] for entry in meant]
