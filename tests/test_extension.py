"""A package outside the repository adds a pass, a recipe and a weight format: samples/extension.

.ci/check_wheel.py installs the same package beside the wheel, and builds with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qcompile import pipeline
from qcompile.errors import UsageError
from qcompile.passes.schedule import Schedule
from qcompile.plugins.entries import installed
from qcompile.recipe_files.resolved import resolve
from qcompile.testing import decoder
from tests.cli.test_app import code_of
from tests.support.extension import PACKAGE, installed_extension

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed_extension(tmp_path_factory.mktemp("site")):
        yield


def test_the_tests_of_the_package_pass(extension: None) -> None:
    page = PACKAGE / "tests" / "test_example.py"
    text = page.read_text(encoding="utf-8")
    assert "from tests" not in text  # it must run without this repository
    space: dict[str, Any] = {}
    exec(compile(text, str(page), "exec"), space)
    tests = [value for name, value in space.items() if name.startswith("test_")]
    assert len(tests) == 4
    for test in tests:
        test()


def test_commands_know_the_package(extension: None, capsys: Capture) -> None:
    assert installed() == [
        "qcompile.formats w4_sym_g128 qcompile-example 1.0",
        "qcompile.passes widen_narrow qcompile-example 1.0",
        "qcompile.recipes wide-ends qcompile-example 1.0",
    ]
    assert code_of("passes", "--json") == 0
    last = json.loads(capsys.readouterr().out)[-1]
    assert (last["name"], last["package"]) == ("widen_narrow", "qcompile-example 1.0")
    assert code_of("recipes") == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["wide-ends", "w4_asym_g128", "int8", "kv8"]
    assert (
        code_of("recipes", "wide-ends", "--pass", "widen_narrow@after=rotate", "--set", "widen_narrow.features=9") == 0
    )
    printed = capsys.readouterr().out
    assert 'passes = ["widen_narrow@after=rotate"]' in printed and '"widen_narrow.features" = 9' in printed
    assert len([line for line in printed.splitlines() if line.startswith("[rules.")]) == 5


def test_an_artifact_of_all_three_is_built_again_from_its_recipe(extension: None, tmp_path: Path) -> None:
    model = decoder(layers=1, kv_heads=1)
    options = {"widen_narrow.features": 16}
    pipeline.build(model, tmp_path / "a", recipe="wide-ends", passes=["widen_narrow"], options=options)
    pipeline.build(model, tmp_path / "b", recipe=tmp_path / "a" / "recipe.toml")
    manifests = [(tmp_path / name / "qcompile.json").read_bytes() for name in "ab"]
    assert manifests[0] == manifests[1] and json.loads(manifests[0])["recipe"]["passes"] == ["widen_narrow"]


def test_places_of_passes(extension: None) -> None:
    def order(*passes: str, recipe: str = "w4a8") -> list[str]:
        return [one.name for one in Schedule(resolve(recipe, passes=passes), "cpu").model_passes()]

    plain = order()
    assert order("widen_narrow") == [plain[0], "widen_narrow", *plain[1:]]
    at = plain.index("rotate") + 1
    assert order("qcompile_example.widen_narrow:WidenNarrow@after=rotate") == [*plain[:at], "widen_narrow", *plain[at:]]
    with pytest.raises(
        UsageError, match=r"widen_narrow is to run after rotat, which is no pass; .*did you mean rotate"
    ):
        order("widen_narrow@after=rotat")
    with pytest.raises(UsageError, match="needs a graph at stage raise; after quantize it is at quantize"):
        order("widen_narrow@after=quantize")
    with pytest.raises(UsageError, match="there is a pass widen_narrow already"):
        order("widen_narrow", "widen_narrow@after=rotate")


def test_options_of_a_pass_are_its_fields(extension: None) -> None:
    def made(**options: object) -> Any:
        named = {f"widen_narrow.{name}": value for name, value in options.items()}
        schedule = Schedule(resolve("w4a8", named, passes=["widen_narrow"]), "cpu")
        return schedule.model_passes()[1]

    assert made().options() == {"enabled": True, "features": 64}
    assert made(features=3, enabled=False).options() == {"enabled": False, "features": 3}
    with pytest.raises(UsageError, match="pass widen_narrow has no field featurs"):
        made(featurs=3)
    with pytest.raises(UsageError, match=r"widen_narrow.features=many: write a whole number"):
        made(features="many")


def test_commands_that_keep_models_refuse_passes(extension: None, tiny_checkpoint: Path, tmp_path: Path) -> None:
    from qcompile.cli import models
    from qcompile.cli.options import Building

    path = tmp_path / "mine.toml"
    path.write_text('passes = ["widen_narrow"]')
    with pytest.raises(UsageError, match="recipe mine names passes of other packages: `qcompile build` it first"):
        models.artifact_of(str(tiny_checkpoint), Building(recipe=str(path)))
