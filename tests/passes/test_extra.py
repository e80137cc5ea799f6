"""Passes of other modules find their places, and wrong ones, like wrong entry points, are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qcompile.errors import UsageError
from qcompile.formats.registry import weight_format
from qcompile.passes.schedule import Schedule
from qcompile.recipe_files.resolved import resolve
from qcompile.recipes import RECIPES
from tests.support.extension import on_path, write_metadata

LATE = """
from dataclasses import dataclass
from qcompile.passes.base import Pass, PassResult

@dataclass(frozen=True)
class Late(Pass):
    name = "late"
    def run(self, graph):
        return PassResult(graph.clone(), 0)

@dataclass(frozen=True)
class Early(Late):
    name = "early"
    needed: int

@dataclass(frozen=True)
class Later(Late):
    name = "later"

class Plain(Late):
    name = "cache"

Broken = 3
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "late_passes.py").write_text(LATE)
    (tmp_path / "failing.py").write_text("raise RuntimeError('two\\nlines')")
    with on_path(tmp_path):
        yield


def test_drafts_run_what_comes_after_the_cache(module: None) -> None:
    def of_draft(*added: str) -> list[str]:
        schedule = Schedule(resolve("qspec", passes=[f"late_passes:Late@after={after}" for after in added]), "cpu")
        ((_, passes),) = schedule.recipe_drafts()
        return [one.name for one in passes]

    drafted = of_draft()
    assert drafted[0] == "speculate" and of_draft("fuse") == [
        *drafted[: drafted.index("fuse") + 1],
        "late",
        *drafted[drafted.index("fuse") + 1 :],
    ]
    assert "late" not in of_draft("calibrate")  # the draft is derived from what it returned


def test_passes_of_one_place_keep_their_order(module: None) -> None:
    passes = ["late_passes:Late@after=fuse", "late_passes:Later@after=fuse"]
    names = [one.name for one in Schedule(resolve("w4a8", passes=passes), "cpu").model_passes()]
    assert names[names.index("fuse") + 1 :][:2] == ["late", "later"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("late_passes:Nothing", "cannot be imported: AttributeError: module 'late_passes' has no attribute 'Nothing'"),
        ("late_passes:Broken", "3 is no dataclass that inherits from qcompile.passes.base.Pass"),
        ("late_passes:Early", "field needed needs a default"),
        ("late_passes:Plain", "there is a pass cache already"),
        ("failing:X", "pass failing:X cannot be imported: RuntimeError: two$"),
        ("late", r"pass late is not installed; no package adds any \(did you mean latent\?\)\. Write module:Class"),
        ("rotate", "pass rotate is a part of qcompile already: --set rotate.FIELD=VALUE"),
        ("rotat@after=quantize", r"pass rotat is not installed; .*\(did you mean rotate\?\)"),
        ("late_passes:Late@before=fuse", "write module:Class, or the name"),
        ("late_passes:Late@after=", "write module:Class, or the name"),
        ("", "write module:Class, or the name"),
    ],
)
def test_wrong_passes(spec: str, message: str, module: None) -> None:
    with pytest.raises(UsageError, match=message):
        Schedule(resolve("w4a8", passes=[spec]), "cpu").model_passes()


def test_wrong_entry_points(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("three = 3\ntables = {'base': 'w4a9'}\n")
    groups = {
        "qcompile.recipes": {"number": "wrong:three", "bad": "wrong:tables", "gone": "nowhere:x", "f32": "wrong:three"},
        "qcompile.formats": {"w3": "wrong:three"},
    }
    write_metadata(tmp_path, "wrong-package", groups)
    with on_path(tmp_path):
        for name, message in (
            ("number", "entry point number of qcompile.recipes in wrong-package 1.0: 3 is neither the path"),
            ("bad", "entry point bad of .*: recipe w4a9 is unknown"),
            ("gone", r"nowhere:x cannot be imported \(ModuleNotFoundError: No module named 'nowhere'\): mend or rem"),
        ):
            with pytest.raises(UsageError, match=message):
                resolve(name)
        assert resolve("f32").base is RECIPES["f32"]  # qcompile's own names win
        with pytest.raises(UsageError, match=r"entry point w3 of .*: 3 is no WeightFormat of this name"):
            weight_format("w3")
        with pytest.raises(UsageError, match=r"weight format w2 is unknown; there are f32, .*nested_4, w3"):
            weight_format("w2")


def test_one_name_of_two_packages_is_refused(tmp_path: Path) -> None:
    for package, place in (("one", "a:x"), ("two", "b:x")):
        write_metadata(tmp_path, package, {"qcompile.recipes": {"mine": place}})
    with (
        on_path(tmp_path),
        pytest.raises(UsageError, match=r"mine of qcompile.recipes in (one|two) 1.0: (one|two) 1.0"),
    ):
        resolve("mine")
