"""The command `sensitivity`: losses as text and JSON, a plot, and a recipe that a build takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import qcompile
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
