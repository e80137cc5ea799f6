"""The command `recipes`: lists, checks and prints recipes, and shows what one chooses for a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qcompile.recipes import RECIPES
from tests.cli.test_app import code_of

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text('kv = "kv8"\n[rules.first]\nrole = "down"\nlayers = 0\nweight = "w8_sym_channel"\n')
    return path


def test_all_recipes_are_listed(capsys: Capture) -> None:
    assert code_of("recipes") == 0
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines()] == ["recipe", *RECIPES]
    assert "int8_g128 (GPUs: int8)" in table
    calibrating = [line.split()[0] for line in table.splitlines() if line.endswith("; calibrates (--calib)")]
    assert calibrating == [name for name, recipe in RECIPES.items() if recipe.calibrated] and "qserve" in calibrating
    assert code_of("recipes", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == list(RECIPES) and listed[0]["kv"] == "kv32"


def test_a_file_is_checked_and_printed(mine: Path, capsys: Capture) -> None:
    formats = "--head-dtype", "bf16", "--embedding-dtype", "int8"
    assert code_of("recipes", mine, "--set", "rules.first.layers=1", *formats) == 0
    printed = capsys.readouterr().out
    assert '[rules.first]\nrole = "down"\nlayers = "1"\nweight = "w8_sym_channel"\n' in printed
    mine.write_text(printed)
    assert code_of("recipes", mine) == 0 and capsys.readouterr().out == printed
    assert code_of("recipes", mine, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rules"]["first"]["layers"] == "1" and facts["head_dtype"] == "bf16" and facts["toml"] == printed
    assert facts["options"]["assign_precision.embedding"] == "int8"


def test_what_a_recipe_chooses_for_a_model(mine: Path, tiny_checkpoint: Path, capsys: Capture) -> None:
    assert code_of("recipes", mine, tiny_checkpoint, "--json") == 0
    linears = json.loads(capsys.readouterr().out)["linears"]
    by_rule = [row for row in linears if row["rules"]]
    assert [(row["layer"], row["roles"], row["weight"], row["activation"], row["rules"]) for row in by_rule] == [
        (0, ["down"], "w8_sym_channel", "int8", ["first"])
    ]
    assert by_rule[0]["names"] == ["model.layers.0.mlp.down_proj.weight"]
    assert linears[-1]["roles"] == ["head"] and len({row["layer"] for row in linears}) > 1
    assert code_of("recipes", "w8a8", tiny_checkpoint) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "down", "model.layers.0.mlp.down_proj.weight", "w8_sym_channel", "x", "int8_g128"] in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--head-dtype", "bf16"), "--head-dtype changes a recipe: give the name of one, or a file"),
        (("--embedding-dtype", "int8"), "--embedding-dtype changes a recipe: give the name of one, or a file"),
        (("w4a9",), "recipe w4a9 is unknown"),
        (("MINE", "--set", "rules.first.weight=w3"), "rule first: weight format w3 is unknown"),
        (("MINE", "--set", "rules.first.kv=kv8"), "the KV cache has one format for all layers"),
        (("MINE", "--set", "cache.fromat=kv8"), "pass cache has no field fromat"),
        (("MINE", "--set", "rules.first.layers=9", "MODEL"), "rule first: layers 9 do not all exist"),
    ],
)
def test_wrong_recipes(
    arguments: tuple[str, ...], message: str, mine: Path, tiny_checkpoint: Path, capsys: Capture
) -> None:
    names = {"MINE": str(mine), "MODEL": str(tiny_checkpoint)}
    assert code_of("recipes", *(names.get(word, word) for word in arguments)) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]


def test_explain_tells_how_rules_run(mine: Path, tiny_checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    build = ("build", tiny_checkpoint, "-o", tmp_path / "out", "--explain")
    assert code_of(*build, "assign_precision", "--recipe", mine) == 0
    assert "keeps w8_sym_channel x int8, which an earlier pass decided" in capsys.readouterr().out
    assert code_of("inspect", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert "recipe   mine (from w4a8) cache.format=kv8\n" in shown
    assert "rules 1 (rules=['first: down; layers 0 -> w8_sym_channel'])" in shown
