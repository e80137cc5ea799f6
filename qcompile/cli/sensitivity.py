"""The command `sensitivity`: what each number format costs each linear of a model, and the mix that costs least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from qcompile import sample_text, texts
from qcompile.checkpoints import hub
from qcompile.cli import console, plot_files, refusals
from qcompile.cli.options import Hub, Json, Model, PassFields, Recipe, Remote, Target, command
from qcompile.errors import ResourceError, UsageError
from qcompile.recipe_files.resolved import Resolved
from qcompile.recipe_files.rules import rule_of
from qcompile.recipes import parse_options


@dataclass(frozen=True)
class StudiedText:
    """The text on which losses are measured."""

    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE|sample", help='Text: plain, or JSON lines with a "text" field.'),
    ] = None
    samples: Annotated[int, typer.Option("--samples", min=1, metavar="N", help="Parts of the text to measure on.")] = 4
    length: Annotated[int, typer.Option("--length", min=2, metavar="TOKENS", help="Tokens per part.")] = 256
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed that chooses the parts.")] = 0


@dataclass(frozen=True)
class Studied:
    """What of a model is measured, in which formats."""

    recipe: Recipe = "w4a8"
    target: Target = "cpu"
    options: PassFields = None
    formats: Annotated[
        str,
        typer.Option(
            "--formats",
            metavar="LIST",
            help="Formats to compare, with commas between: WEIGHT or WEIGHT:ACTIVATION. "
            "Default: w4_asym_g128,w4_asym_g32,w8_sym_channel,bf16, as far as the target has them.",
        ),
    ] = ""
    layers: Annotated[
        str,
        typer.Option("--layers", metavar="LIST", help='Layers to measure: "first 2, 5, 8-10, last 1". Default: all.'),
    ] = ""


@dataclass(frozen=True)
class MixedRecipe:
    """The recipe to write, and the study that it follows from, if it was made before."""

    study: Annotated[
        Path | None, typer.Option("--study", metavar="FILE", help="Read what --json printed, and measure nothing.")
    ] = None
    write_recipe: Annotated[
        Path | None, typer.Option("--write-recipe", metavar="FILE", help="Write the mix of --bits as a recipe (TOML).")
    ] = None
    bits: Annotated[
        float | None, typer.Option("--bits", min=1.0, max=32.0, help="Most bits per weight, scales included.")
    ] = None
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the result: FILE ends in .svg, .png or .pdf.")
    ] = None


@command
def sensitivity(
    model: Model,
    text: StudiedText,
    studied: Studied,
    result: MixedRecipe,
    access: Hub,
    allow_remote_code: Remote = False,
    json: Json = False,
) -> None:
    """Measure what each number format costs each linear of a model, and choose formats for a number of bits.

    \b
    Example:
      qcompile sensitivity samples/pycode-26m --data samples/text.jsonl
      qcompile sensitivity samples/pycode-26m --data sample --bits 5 --write-recipe mixed.toml --plot losses.svg
      qcompile build samples/pycode-26m -o out/mixed --recipe mixed.toml
      qcompile sensitivity samples/pycode-26m --data sample --json > study.json
      qcompile sensitivity samples/pycode-26m --study study.json --bits 6 --write-recipe larger.toml
    """
    recipe = _checked(model, text, studied, result)
    if result.study is not None:
        _show(_read(model, recipe, studied, result), result, json)
        return
    with console.Progress() as progress:
        directory = hub.find(model, allow_remote_code, progress=progress, **asdict(access))
    with console.Progress() as progress:
        progress("import", 0, 1)
        from qcompile.calibration import CalibrationSource
        from qcompile.passes.sensitivity import study as studies

        pairs = studies.formats_for(_listed(studied.formats), recipe, studied.target)
        assert text.data is not None
        given = sample_text.FOLDER if str(text.data) == "sample" else text.data
        source = CalibrationSource(given, text.samples, text.length, text.seed)
        remote = {"allow_remote": allow_remote_code}
        subject = studies.Subject(directory, recipe, studied.target, source, remote, studied.layers)
        measured = studies.study(subject, pairs, result.bits, progress)
    if result.write_recipe is not None:
        _write(result.write_recipe, studies.recipe_for(measured, result.write_recipe.stem))
    _show(measured.facts(), result, json)


def _read(model: str, recipe: Resolved, studied: Studied, result: MixedRecipe) -> Mapping[str, Any]:
    """The study of a file, of which the recipe is written if one is asked for."""
    from qcompile.passes.sensitivity.saved import read_study

    assert result.study is not None
    saved = read_study(result.study)
    local = {"model": Path(model).name} if Path(model).exists() else {}  # that of the hub has the name of its snapshot
    saved.require(**local, recipe=recipe.name, target=studied.target)
    if result.write_recipe is not None and result.bits is not None:
        _write(result.write_recipe, saved.recipe(recipe, result.bits, result.write_recipe.stem))
    return saved.facts


def _show(facts: Mapping[str, Any], result: MixedRecipe, json: bool) -> None:
    """Draw the study, if that is asked for, and print it."""
    if result.plot is not None:
        from qcompile.cli import sensitivity_plot

        sensitivity_plot.draw(facts, result.plot)
    if json:
        console.print_json(facts)
    else:
        console.show(_as_text(facts))


def _checked(model: str, text: StudiedText, studied: Studied, result: MixedRecipe) -> Resolved:
    """The recipe to start from. Refuses at once what is wrong with the options."""
    if (text.data is None) == (result.study is None):
        raise UsageError("give --data, the text to measure on, or --study, what was measured before")
    if result.study is not None and (studied.formats or studied.layers):
        raise UsageError("--study: --formats and --layers are those of the study")
    recipe = refusals.check_formats(studied.recipe, studied.target, None, parse_options(studied.options or []))
    refusals.check_models(model)
    if studied.layers:
        rule_of("--layers", {"layers": studied.layers, "weight": "f32"})
    if (result.write_recipe is None) != (result.bits is None):
        missing, given = ("--bits", "--write-recipe") if result.bits is None else ("--write-recipe", "--bits")
        raise UsageError(f"{given} needs {missing}: --bits limits the bits per weight of the written recipe")
    if result.write_recipe is not None and not result.write_recipe.absolute().parent.is_dir():
        raise UsageError(f"--write-recipe {result.write_recipe}: there is no folder {result.write_recipe.parent}")
    if result.write_recipe is not None and result.write_recipe.suffix != ".toml":
        raise UsageError(f"--write-recipe {result.write_recipe}: its name must end in .toml")
    if result.plot is not None:
        plot_files.check(result.plot)
    if text.data is not None and str(text.data) != "sample":
        texts.check(text.data, tables=True)
    return recipe


def _listed(formats: str) -> list[str]:
    return [part.strip() for part in formats.split(",") if part.strip()]


def _write(path: Path, recipe: Resolved) -> None:
    try:
        path.write_text(recipe.text(), encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}") from error
    console.note(f"qcompile: wrote {path}: qcompile build MODEL -o OUT --recipe {path}")


def _as_text(facts: Mapping[str, Any]) -> str:
    """The tables of a study."""
    rows = [
        [
            str(unit["layer"]),
            ", ".join(unit["roles"]),
            f"{each['weight']} x {each['activation']}",
            console.byte_size(each["bytes"]),
            f"{each['bits']:.3f}",
            f"{each['kl']:.6f}",
            f"{each['perplexity'] - facts['perplexity']:+.4f}",
        ]
        for unit in facts["units"]
        for each in unit["formats"]
    ]
    titles = ["layer", "linears", "formats", "size", "bits", "divergence", "perplexity"]
    tables = [console.table(titles, rows, words=titles[1:3])]
    mixes = [*facts["mixes"], *([facts["chosen"]] if facts["chosen"] else [])]
    sums = [
        [
            mix["name"],
            f"{mix['bits']:.3f}",
            console.byte_size(mix["bytes"]),
            f"{mix['predicted_us']:,.1f}",
            f"{mix['expected_kl']:.5f}",
            f"{mix['kl']:.5f}",
            f"{mix['perplexity']:.4f}",
            "*" if mix.get("best") else "",
        ]
        for mix in mixes
    ]
    titles = ["together", "bits", "size", "us/token", "sum", "divergence", "perplexity", "best"]
    tables.append(console.table(titles, sums, words=("best",)))
    measured = f"{facts['samples']} x {facts['length']} tokens"
    return "\n\n".join([*tables, f"exact: perplexity {facts['perplexity']:.4f} on {measured}"])
