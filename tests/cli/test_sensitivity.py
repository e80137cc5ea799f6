"""The command `sensitivity`: losses as text and JSON, a plot, and a recipe that a build takes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qcompile
from qcompile.cli.allocating import bytes_of
from tests.cli.test_app import code_of

Capture = pytest.CaptureFixture[str]
FAST = ("--data", "samples/text.jsonl", "--samples", "1", "--length", "32", "--formats", "w4_asym_g128,w8_sym_channel")


def test_a_study_and_its_recipe(tiny_checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    recipe, plot = tmp_path / "mixed.toml", tmp_path / "losses.svg"
    more = ("--bits", "6", "--write-recipe", recipe, "--plot", plot, "--json")
    assert code_of("sensitivity", tiny_checkpoint, *FAST, *more) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["units"]) == 9 and [mix["name"] for mix in facts["mixes"][:2]] == [
        "w4_asym_g128:int8",
        "w8_sym_channel:int8",
    ]
    assert facts["mixes"][1]["kl"] < facts["chosen"]["kl"] < facts["mixes"][0]["kl"]
    assert 5 < facts["chosen"]["bits"] <= 6
    assert "down" in plot.read_text() and "chosen" in plot.read_text()
    assert code_of("recipes", recipe, tiny_checkpoint, "--json") == 0
    linears = json.loads(capsys.readouterr().out)["linears"]
    built = {name: f"{row['weight']}:{row['activation']}" for row in linears for name in row["names"]}
    chosen = {name: facts["chosen"]["formats"][unit["name"]] for unit in facts["units"] for name in unit["names"]}
    assert built == chosen and len(set(chosen.values())) == 2


def test_layers_are_chosen_and_shown(tiny_checkpoint: Path, capsys: Capture) -> None:
    assert code_of("sensitivity", tiny_checkpoint, *FAST, "--layers", "first 1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "linears", "formats", "size", "bits", "divergence", "perplexity"]
    assert [line.split()[0] for line in lines[1:9]] == ["0"] * 8 and not lines[9]
    assert lines[-1].startswith("exact: perplexity ") and lines[-1].endswith("on 1 x 32 tokens")


def test_a_saved_study_gives_recipes_of_other_sizes(
    tiny_checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without measuring again, the same recipe follows for the same bits, but for its description."""
    recipes = [tmp_path / f"{name}.toml" for name in ("measured", "read", "larger")]
    assert code_of("sensitivity", tiny_checkpoint, *FAST, "--bits", "6", "--write-recipe", recipes[0], "--json") == 0
    saved, plot = tmp_path / "study.json", tmp_path / "again.svg"
    saved.write_text(capsys.readouterr().out)
    monkeypatch.setattr("qcompile.passes.sensitivity.study.study", None)
    for bits, recipe in (("6", recipes[1]), ("8.5", recipes[2])):
        given = ("--study", saved, "--bits", bits, "--write-recipe", recipe, "--plot", plot)
        assert code_of("sensitivity", tiny_checkpoint, *given) == 0
    assert "exact: perplexity" in capsys.readouterr().out and "chosen" in plot.read_text()
    assert code_of("sensitivity", tiny_checkpoint, "--study", saved, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(saved.read_text())
    rules = [tomllib.loads(recipe.read_text()) for recipe in recipes]
    assert rules[0]["rules"] == rules[1]["rules"] and "sum of divergences" in rules[1]["description"]
    assert rules[2]["rules"] != rules[1]["rules"]


def test_auto_takes_the_mix_of_a_study(tiny_checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    """The artifact's recipe repeats the build to the byte, and its report has the mixes."""
    assert code_of("sensitivity", tiny_checkpoint, *FAST, "--json") == 0
    saved = tmp_path / "study.json"
    saved.write_text(capsys.readouterr().out)
    weights = sum(unit["outputs"] * unit["inputs"] for unit in json.loads(saved.read_text())["units"])
    given = ("--recipe", "auto", "--study", saved, "--calib", "none")
    assert code_of("build", tiny_checkpoint, "-o", tmp_path / "a", *given, "--target-bits", "6", "--json") == 0
    said = capsys.readouterr()
    assert f"recipe auto takes the mix of {saved} for at most 6.000 bits" in said.err
    assert 5 < json.loads(said.out)["bits_per_weight"] <= 6
    size = f"{weights * 6 // 8}B"
    assert code_of("build", tiny_checkpoint, "-o", tmp_path / "b", *given, "--target-size", size) == 0
    assert code_of("build", tiny_checkpoint, "-o", tmp_path / "c", "--recipe", tmp_path / "a" / "recipe.toml") == 0
    first, second, third = ((tmp_path / name / "qcompile.json").read_bytes() for name in "abc")
    assert first == second == third
    report = json.loads((tmp_path / "a" / "report.json").read_text())
    assert report["study"]["names"][:2] == ["w4_asym_g128:int8", "w8_sym_channel:int8"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--recipe", "w4a8"), "--study is for recipe auto, which mixes formats: w4a8 has formats of its own"),
        (("--head-dtype", "bf16"), "--head-dtype and --study: the mix of a study chooses the format of the output"),
        (("--max-perplexity-increase", "0.1"), "--max-perplexity-increase is not for --study"),
        (("--target-bits", "5", "--target-size", "1MB"), "--target-bits and --target-size: give one of them"),
        (("--target-size", "large"), "--target-size large: write bytes, such as 500MB or 1.5GiB"),
    ],
)
def test_what_auto_refuses_of_a_study(options: tuple[str, ...], message: str, tmp_path: Path, capsys: Capture) -> None:
    saved = tmp_path / "study.json"
    saved.write_text("{}")
    given = ("--recipe", "auto", "--study", saved)
    assert code_of("build", "samples/pycode-1m", "-o", tmp_path / "a", *given, *options) == 2
    assert message in capsys.readouterr().err


def test_a_size_without_a_study_is_refused(tmp_path: Path, capsys: Capture) -> None:
    given = ("--recipe", "auto", "--target-size", "1MB")
    assert code_of("build", "samples/pycode-1m", "-o", tmp_path / "a", *given) == 2
    assert "--target-size needs --study" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "size"), [("12", 12), ("500MB", 500_000_000), ("1.5 GiB", 3 << 29), ("2k", 2000)])
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == size


def without(name: str) -> Callable[[Any], Any]:
    return lambda facts: {key: value for key, value in facts.items() if key != name}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda facts: [], (), "is no study that qcompile sensitivity --json wrote: "),
        (without("units"), (), "'units' is missing"),
        (lambda facts: facts | {"units": []}, (), "it names no model, recipe, target or linears"),
        (lambda facts: facts | {"units": [{"names": [1]}]}, (), "'roles' is missing"),
        (lambda facts: facts | {"mixes": [{"name": "m"}]}, (), "'bits' is missing"),
        (lambda facts: facts | {"perplexity": "low"}, (), "'low' is no number"),
        (lambda facts: facts | {"perplexity": float("nan")}, (), "it has NaN"),
        (lambda facts: facts | {"model": "other"}, (), "--study: it is of model other, not of "),
        (lambda facts: facts, ("--recipe", "w8a8"), "--study: it is of recipe w4a8, not of w8a8"),
        (lambda facts: facts, ("--formats", "bf16"), "--formats and --layers are those of the study"),
        (lambda facts: facts, ("--data", "sample"), "give --data, the text to measure on, or --study"),
    ],
)
def test_studies_that_are_refused(
    change: Callable[[Any], Any], options: tuple[str, ...], message: str, tmp_path: Path, capsys: Capture
) -> None:
    loss = {
        "weight": "bf16",
        "activation": "bf16",
        "kl": 0.1,
        "perplexity": 9.0,
        "bytes": 8,
        "bits": 16,
        "predicted_us": 1,
    }
    unit = {"name": "a", "layer": 0, "roles": ["up"], "names": ["a.weight"], "outputs": 2, "inputs": 2}
    facts = {"model": "pycode-1m", "recipe": "w4a8", "target": "cpu", "samples": 1, "length": 2, "perplexity": 8.0}
    saved = tmp_path / "study.json"
    saved.write_text(json.dumps(change(facts | {"units": [unit | {"formats": [loss]}], "mixes": [], "chosen": None})))
    assert code_of("sensitivity", "samples/pycode-1m", "--study", saved, *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--bits", "5"), "--bits needs --write-recipe"),
        (("--write-recipe", "m.toml"), "--write-recipe needs --bits"),
        (("--write-recipe", "m.txt", "--bits", "5"), "its name must end in .toml"),
        (("--layers", "most"), "rule --layers: layers = "),
        (("--plot", "p.gif"), "--plot p.gif: its name must end in .svg"),
    ],
)
def test_what_is_refused_at_once(
    options: tuple[str, ...], message: str, tiny_checkpoint: Path, capsys: Capture
) -> None:
    assert code_of("sensitivity", tiny_checkpoint, "--data", "samples/text.jsonl", *options) == 2
    assert message in capsys.readouterr().err


def test_a_mix_beats_uniform_formats_of_its_bits(tmp_path: Path) -> None:
    """Built artifacts on other text than the study's have perplexities of 31 and 47."""
    model, recipe = "samples/pycode-1m", tmp_path / "mixed.toml"
    given = ("--data", "samples/text.jsonl", "--samples", "2", "--length", "128", "--recipe", "w4a16-g32")
    assert code_of("sensitivity", model, *given, "--bits", "5.25", "--write-recipe", recipe) == 0
    head = {"role": "head", "weight": "w4_asym_g32", "activation": "bf16"}
    uniform = {"base": "w4a16-g32", "rules": {"head": head}}
    bits, losses = [], []
    for name, chosen in (("mixed", recipe), ("uniform", uniform)):
        bits.append(qcompile.build(model, tmp_path / name, recipe=chosen).bits_per_weight)
        with qcompile.load(tmp_path / name, threads=1) as llm:
            losses.append(llm.perplexity("samples/heldout.jsonl", 512, max_windows=8).perplexity)
    assert bits[0] <= bits[1]
    assert losses[0] < 0.9 * losses[1]
