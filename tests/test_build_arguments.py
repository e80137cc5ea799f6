"""What `qcompile.build` is given from Python: what fits no model, or no type, is refused, never ignored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import qcompile
from qcompile import check, pipeline
from qcompile.cli import inspect
from qcompile.errors import UsageError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.rotate import Rotate
from tests.support.graphs import decoder


@dataclass(frozen=True)
class Doubled(Pass):
    """Makes the output head of a graph give twice its logits."""

    name: ClassVar[str] = "doubled"
    enabled: bool = False

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        head = graph.calls("linear")[-1]
        head.update_arg(1, graph.call_weight("scale", head.args[1], 2.0))
        return PassResult(graph, 1, ("a note",))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_position": 64}, "max_position are for modules"),
        ({"example_inputs": ()}, "max_position are for modules"),
        ({"options": {"rotate.enabled": None}}, "rotate.enabled must be a text, a number, True or False, not None"),
        ({"drafts": "nowhere"}, "^nowhere does not exist"),
        ({"drafts": Path("nowhere")}, "^nowhere does not exist"),
        ({"passes": [Rotate]}, "passes must be instances of Pass, not <class"),
        ({"passes": [Rotate(enabled=True)]}, "pass rotate runs anyway: give its fields in options"),
        ({"passes": [Doubled()]}, r"pass doubled\{enabled=False\} is not enabled"),
        ({"calib": ["a text"]}, "calibration takes a file of text or a tensor of token ids .*, not list"),
    ],
)
def test_arguments_without_a_meaning(given: Any, message: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        qcompile.build(str(tiny_checkpoint), tmp_path / "out", **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("recpe", r"^build\(\) got an unexpected keyword argument 'recpe' \(did you mean recipe\?\)$"),
        ("example_input", "did you mean example_inputs"),
        ("source", r"unexpected keyword argument 'source'$"),
        ("zzz", r"^build\(\) got an unexpected keyword argument 'zzz'$"),
    ],
)
def test_misspelt_arguments_are_named(name: str, message: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    for model in (str(tiny_checkpoint), decoder(layers=1)):
        with pytest.raises(TypeError, match=message):
            qcompile.build(model, tmp_path / "out", **{name: 3})
    with pytest.raises(TypeError, match=rf"^plan\(\) got an unexpected keyword argument '{name}'"):
        pipeline.plan(decoder(layers=1), **{name: 3})
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


def test_a_pass_of_ones_own_runs_before_the_recipes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    logits = []
    for name, own in (("plain", ()), ("doubled", (Doubled(enabled=True),))):
        report = qcompile.build(str(tiny_checkpoint), tmp_path / name, recipe="f32", passes=own, check_passes=True)
        with qcompile.load(report.path) as llm:
            logits.append(llm.logits([[1, 2, 3]]))
    assert check.max_relative_error(logits[1], 2 * logits[0]) < 1e-5
    entries = inspect.passes(tmp_path / "doubled")
    assert [entry["name"] for entry in entries][:2] == ["raise", "doubled"] and entries[1]["notes"] == ["a note"]
    assert entries[1]["max_relative_error"] > 0.1
