"""Recipes of one's own: what a file may say, what it resolves to, and that an artifact's recipe repeats its build."""

from __future__ import annotations

import filecmp
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from qcompile import pipeline
from qcompile.errors import UsageError
from qcompile.recipe_files.resolved import RECIPE_FILE, recipe_file, resolve
from qcompile.recipe_files.rules import GROUPS, ROLES, rule_of
from qcompile.recipe_files.toml import read_value, toml_lines
from qcompile.recipes import get_recipe
from qcompile.testing import decoder, sequence_inputs
from tests.support.graphs import logits_whatever_the_step, step_inputs

FIVE_RULES = """
base = "w4a8"
description = "ends in 8 bits: \\u00e9\\U0001F600"
kv = "kv8"
head = "bf16"

[options]
rotate_keys.enabled = true
"calibrate.descent" = 2
quantize = {mixed_fraction = 0.25}

[rules.first_down]
role = "down"
layers = "first 1, last 1"
weight = "w8_sym_channel"

[rules.values]
role = ["value", "key"]
layers = [0]
weight = "bf16"
activation = "bf16"

[rules."by name"]
names = ["o1", "x*"]
weight = "mxfp4"
activation = "int8_g128"

[rules.gates]
role = "gate"
layers = 1
weight = "qoq_channel"

[rules.all]
role = "mlp"
activation = "int8"
"""


@pytest.fixture
def five(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(FIVE_RULES, encoding="utf-8")
    return path


def test_a_file_is_its_base_and_what_it_changes(five: Path) -> None:
    recipe = resolve(five)
    assert (recipe.name, recipe.base, recipe.head_dtype) == ("mine", get_recipe("w4a8"), "bf16")
    assert recipe.options == (
        ("cache.format", "kv8"),
        ("rotate_keys.enabled", "true"),
        ("calibrate.descent", "2"),
        ("quantize.mixed_fraction", "0.25"),
    )
    assert [rule.name for rule in recipe.rules] == ["first_down", "values", "by name", "gates", "all"]
    assert recipe.settings()["rules"] == {"rules": recipe.rules}
    assert recipe.settings()["assign_precision"]["head"] == "bf16"
    assert resolve(str(five)) == recipe and not recipe.is_plain


def test_a_named_recipe_is_plain() -> None:
    recipe = resolve("w4a8", {"cache.format": "kv8", "rotate.enabled": True})
    assert recipe.is_plain and recipe.settings() == get_recipe("w4a8").settings()
    facts = {"name": "w4a8", "options": {"cache.format": "kv8", "rotate.enabled": "True"}, "head_dtype": None}
    assert recipe.facts() == facts


def test_what_is_written_is_read_back(five: Path, tmp_path: Path) -> None:
    given = {"cache.format": "kv4", "x.y": "1e3", "rules.gates.layers": "0", "rules.new": '{role="up", weight="bf16"}'}
    for recipe in (resolve(five), resolve(five, given, "f32"), resolve("qserve", {"a.b": 'quote " \\ line'})):
        path = tmp_path / "again.toml"
        path.write_text(recipe.text(), encoding="utf-8")
        assert recipe_file(path) == recipe and recipe_file(path).text() == recipe.text()


STUDY = {"names": ["a:b"], "bits": [4.3], "predicted_us": [1], "perplexity": [9.5], "exact": 9.0, "tokens": 64}


def test_the_mixes_of_a_study_are_kept() -> None:
    recipe = resolve({"study": STUDY, "rules": {"up": {"role": "up", "weight": "bf16"}}})
    assert recipe.study is not None and recipe.study.bits == (4.3,)
    assert resolve(tomllib.loads(recipe.text())) == recipe


@pytest.mark.parametrize(
    ("study", "message"),
    [
        ([], "study must be a table with names, bits"),
        (STUDY | {"more": 1}, "study must be a table with names, bits"),
        (STUDY | {"names": "a"}, "names must be a list of texts"),
        (STUDY | {"names": ["a\nb"]}, "names must be texts of one line"),
        (STUDY | {"bits": [1, 2]}, "bits must be a list of 1 positive numbers"),
        (STUDY | {"perplexity": [float("nan")]}, "perplexity must be a list of 1 positive numbers"),
        (STUDY | {"exact": True}, "exact must be a positive number"),
    ],
)
def test_mixes_that_are_refused(study: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve({"study": study})


def test_later_options_win_over_those_of_the_file(five: Path) -> None:
    recipe = resolve(
        five, {"cache.format": "kv4", "rules.first_down.layers": "1", "rules.first_down.names": '["a", "b"]'}
    )
    assert dict(recipe.options)["cache.format"] == "kv4" and recipe.options[-1] == ("cache.format", "kv4")
    (result,) = (rule for rule in recipe.rules if rule.name == "first_down")
    assert (result.layers, result.names, result.weight) == ("1", ("a", "b"), "w8_sym_channel")
    assert len(resolve("w4a8", {"rules.down": '{role = "down", weight = "bf16"}'}).rules) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ''", "name must be a text of one line, not ''"),
        ('name = "a\\nb"', "name must be a text of one line"),
        ("base = 'w4a9'", r"mine.toml: recipe w4a9 is unknown; .*did you mean w4a8"),
        ("bsae = 'w4a8'", r"mine.toml: bsae is unknown; there are base, .*did you mean base"),
        ("base = 4", "base must be a text of one line, not 4"),
        ("head = 'int9'", "head dtype int9 is unknown"),
        ("rules = 3", "rules must be a table, not 3"),
        ("name = 'qserve'", "qserve is the name of another recipe"),
        ("[rules.a]\nrole = 'down'", "rule a chooses nothing: write weight, activation or both"),
        ("[rules.a]\nweight = 'bf16'", "rule a selects nothing: write role, layers or names"),
        ("[rules.a]\nrole = 'dwon'\nweight = 'bf16'", r"rule a: role dwon is unknown; .*did you mean down"),
        ("[rules.a]\nrole = 'router'\nweight = 'bf16'", "routers of experts stay in f32"),
        ("[rules.a]\nrole = 'down'\nkv = 'kv8'", "the KV cache has one format for all layers"),
        ("[rules.a]\nexperts = '0-7'\nweight = 'bf16'", "the experts of a layer share one kernel"),
        ("[rules.a]\nrole = 'down'\nwieght = 'bf16'", r"rule a: wieght is unknown; .*did you mean weight"),
        ("[rules.a]\nrole = []\nweight = 'bf16'", "rule a: role is an empty list"),
        ("[rules.a]\nnames = ['x', 3]\nweight = 'bf16'", "rule a: names must be a text, not 3"),
        ("[rules.a]\nlayers = 'all'\nweight = 'bf16'", "rule a: layers = 'all': write \"first 2, 5, 8-10"),
        ("[rules.a]\nlayers = '3-1'\nweight = 'bf16'", "rule a: layers = '3-1': write"),
        ("[rules.a]\nlayers = 'first 0'\nweight = 'bf16'", "rule a: layers = 'first 0': write"),
        ("[rules.a]\nlayers = true\nweight = 'bf16'", "rule a: layers = True: write"),
        ("[rules]\na = 'w8'", "rule a must be a table"),
        (
            "[options]\ncache.format = ['kv8']",
            r"option cache.format must be a text, a number, True or False, not \['kv8",
        ),
        ("[options]\ncache.format = 'kv8'\n'cache.format' = 'kv4'", "option cache.format occurs twice"),
        ("[options]\nrules.a.weight = 'bf16'", r"rules stand in tables of their own, \[rules.NAME\]"),
        ("base = 'w4a8'\nbase = 'f32'", "mine.toml is not TOML: Cannot overwrite a value"),
        ("x" * (1 << 20) + "=1", "more than 1 MiB"),
    ],
)
def test_what_a_file_may_not_say(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as caught:
        resolve(path)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.toml: there is no such file"):
        resolve(f"{tmp_path}/gone.toml")
    with pytest.raises(UsageError, match=r"is a folder: give a file of it, such as .*recipe.toml"):
        resolve(tmp_path)
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(UsageError, match=r"pipe.toml: no plain file"):
        resolve(tmp_path / "pipe.toml")
    (tmp_path / "bytes.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(UsageError, match="is not TOML: 'utf-8' codec"):
        resolve(tmp_path / "bytes.toml")
    with pytest.raises(UsageError, match="recipe w4a9 is unknown; there are f32"):
        resolve("w4a9")


@pytest.mark.parametrize("text", ["3", "bf16", '{role = "down"', '{role = "down"}\nx = 3'])
def test_a_rule_on_the_command_line_is_a_table(text: str) -> None:
    with pytest.raises(UsageError, match=r"rule a|write a table of TOML, for example rules.a=\{"):
        resolve("w4a8", {"rules.a": text})


def test_every_role_is_described() -> None:
    page = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert not [name for name in (*ROLES, *GROUPS) if f"`{name}`" not in page]
    for name in (*ROLES, *GROUPS):
        assert rule_of("mine", {"role": name, "weight": "bf16"}).roles == (name,)


def test_toml_is_read_back() -> None:
    tables: dict[str, Any] = {
        "a": 'x"\\\n\t\x7f é😀',
        "b": [1, "2"],
        "c d": {"e.f": True, "g": {"h": 0.5}},
        "i": {"j": {}},
    }
    text = "\n".join(toml_lines(tables))
    assert tomllib.loads(text) == {"a": tables["a"], "b": [1, "2"], "c d": tables["c d"]}
    with pytest.raises(ValueError, match="more than one"):
        read_value("1\nb = 2")


def test_the_recipe_of_an_artifact_repeats_its_build(five: Path, tmp_path: Path) -> None:
    model = decoder()
    options = {"rules.first_down.weight": "nvfp4", "rules.first_down.activation": "int8_g128", "rules.all.layers": "1"}
    options |= {"rules.all.role": "up"}
    pipeline.build(model, tmp_path / "a", recipe=str(five), options=options)
    pipeline.build(model, tmp_path / "b", recipe=tmp_path / "a" / RECIPE_FILE)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    same, *different = filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", map(str, files), shallow=False)
    assert len(same) == len(files) > 5 and different == [[], []]
    manifest = json.loads((tmp_path / "a" / "qcompile.json").read_text())
    assert manifest["recipe"]["name"] == "mine" and manifest["recipe"]["base"] == "w4a8"
    assert manifest["recipe"]["rules"]["first_down"]["weight"] == "nvfp4"
    calls = json.loads((tmp_path / "a" / "graphs" / "program.json").read_text())["calls"]
    formats = {call["format"] for call in calls if call["kernel"] == "gemm"}
    assert formats == {"w4_asym_g128", "nvfp4", "bf16", "mxfp4", "qoq_channel"}
    ids, _ = sequence_inputs(9, 2)
    computed = logits_whatever_the_step(tmp_path / "a", ids)
    step = pipeline.plan(model, recipe=tmp_path / "a" / RECIPE_FILE).graphs[-1]
    expected = step.run(*step_inputs(ids, None, step))[0].view_as(computed)
    # Sums of float32 in another order round activations to other codes now and then.
    assert (computed - expected).norm() < 3e-2 * expected.norm()
