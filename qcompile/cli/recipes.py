"""The command `recipes`: the recipes that there are, and what one of them says of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from qcompile.checkpoints import hub
from qcompile.cli import console, refusals
from qcompile.cli.options import Embedding, ExtraPasses, Head, Json, PassFields, Remote, changed, command
from qcompile.errors import UsageError
from qcompile.plugins.entries import entries
from qcompile.recipe_files.resolved import Resolved, resolve
from qcompile.recipes import RECIPES, embedding_option, parse_options

_LISTED = ("name", "weight", "activation", "kv", "head")
"""Facts of a recipe that have a column in the list."""


@dataclass(frozen=True)
class Changes:
    """What a user changes of a recipe."""

    head_dtype: Head = None
    embedding_dtype: Embedding = None
    options: PassFields = None
    passes: ExtraPasses = None


@command
def recipes(
    changes: Changes,
    recipe: Annotated[
        str | None, typer.Argument(metavar="[NAME|FILE]", help="Recipe to check and print. Default: list all.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Model to show the recipe's choices for, linear by linear."),
    ] = None,
    allow_remote_code: Remote = False,
    json: Json = False,
) -> None:
    """List the recipes; or check and print one, which may be a TOML file, and show what it chooses for a model.

    \b
    Example:
      qcompile recipes
      qcompile recipes mine.toml --set rules.first_down.weight=bf16
      qcompile recipes mine.toml samples/pycode-26m
    """
    if recipe is None:
        if option := changed(changes):
            name = {"options": "--set", "passes": "--pass"}.get(option, f"--{option.replace('_', '-')}")
            raise UsageError(f"{name} changes a recipe: give the name of one, or a file")
        _list(json)
        return
    options = parse_options(changes.options or []) | embedding_option(changes.embedding_dtype)
    chosen = refusals.check_formats(recipe, "cpu", changes.head_dtype, options, changes.passes or ())
    if model is not None:
        refusals.check_models(model)
    _check(chosen)
    linears = None if model is None else _linears(chosen, model, allow_remote_code)
    if json:
        console.print_json(chosen.facts() | {"toml": chosen.text()} | ({} if linears is None else {"linears": linears}))
        return
    console.show(chosen.text(), end="" if linears is None else "\n")
    if linears is not None:
        console.show(_table(linears))


def _table(linears: list[dict[str, Any]]) -> str:
    """The linears of a model as text."""
    titles = ["layer", "role", "weights", "formats", "rules"]
    rows = [
        [
            str(row["layer"]),
            ", ".join(row["roles"]),
            ", ".join(row["names"]),
            f"{row['weight']} x {row['activation']}",
            ", ".join(row["rules"]),
        ]
        for row in linears
    ]
    return console.table(titles, rows, words=titles[1:])


def _list(json: bool) -> None:
    """Print all recipes, those of other packages last."""
    listed = [_facts(resolve(name)) for name in (*RECIPES, *entries("qcompile.recipes"))]
    if json:
        console.print_json(listed)
        return
    rows = [[*(_shown(facts, part) for part in _LISTED), _about(facts)] for facts in listed]
    console.show(console.table(["recipe", "weights", "activations", "cache", "head", "about"], rows, words=("about",)))


def _about(facts: dict[str, Any]) -> str:
    """What a recipe is, and whether it wants text to calibrate on."""
    return str(facts["description"]) + "; calibrates (--calib)" * bool(facts["calibrated"])


def _shown(facts: dict[str, Any], part: str) -> str:
    """The value of a column, and for activations also that on CPUs if it differs."""
    own = facts.get(f"cpu_{part}", facts[part])
    return str(facts[part]) if own == facts[part] else f"{own} (GPUs: {facts[part]})"


def _facts(recipe: Resolved) -> dict[str, Any]:
    """A recipe's name, its formats (for activations those on GPUs and on CPUs), and what else the list says."""
    options = dict(recipe.options)
    precision = {kind: recipe.settings(kind)["assign_precision"] | _own_formats(options) for kind in ("cpu", "cuda")}
    formats = {part: precision["cuda"][part] for part in ("weight", "activation")}
    formats |= {"cpu_activation": precision["cpu"]["activation"]}
    formats |= {"kv": options.get("cache.format", recipe.base.kv), "head": recipe.head}
    more = {"description": recipe.description, "calibrated": recipe.calibrated, "drafts": len(recipe.drafts)}
    return {"name": recipe.name, **formats, **more}


def _own_formats(options: Mapping[str, str]) -> dict[str, object]:
    """The formats that options of a recipe set for all linears."""
    given = {part: options.get(f"assign_precision.{part}") for part in ("weight", "activation")}
    return {part: format for part, format in given.items() if format is not None}


def _check(recipe: Resolved) -> None:
    """Raise UsageError for formats that there are not, or that do not go together."""
    from qcompile.passes.schedule import Schedule

    Schedule(recipe, "cpu").model_passes()


def _linears(recipe: Resolved, model: str, allow_remote: bool) -> list[dict[str, Any]]:
    """What the recipe chooses for each linear of a model, in order: its layer, roles, weights, formats, and rules."""
    from qcompile.clock import Clock
    from qcompile.passes.assign_precision import AssignPrecision
    from qcompile.passes.rewrite import ImportOptions, rewrite
    from qcompile.passes.roles import sites
    from qcompile.passes.rules import selected
    from qcompile.passes.schedule import Schedule

    passes = Schedule(recipe, "cpu").model_passes()
    passes = passes[: [rewrite.name for rewrite in passes].index(AssignPrecision.name) + 1]
    with console.Progress() as progress:
        directory: Path = hub.find(model, allow_remote, weights=False, progress=progress)
        source = {"allow_remote": allow_remote}
        graph = rewrite(directory, passes, ImportOptions(source), Clock(progress))[0][-1]
    linears, layers = sites(graph)
    chosen: Sequence[tuple[str, set[Any]]] = [
        (rule.name, {site.node for site in selected(rule, linears, layers)}) for rule in recipe.rules
    ]
    return [
        {"layer": site.layer, "roles": list(site.roles), "names": list(site.names)}
        | {part: site.node.meta["precision"][part] for part in ("weight", "activation")}
        | {"rules": [name for name, nodes in chosen if site.node in nodes]}
        for site in linears
    ]
