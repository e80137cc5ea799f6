"""The tables of the documentation list every recipe, target, pass, load option, command and option."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from qcompile.__main__ import app
from qcompile.passes.schedule import PASSES
from qcompile.recipes import RECIPES
from qcompile.runtime.options import LoadOptions
from qcompile.targets import TARGETS

ROOT = Path(__file__).parents[1]


def text(page: str) -> str:
    """A page of the documentation, by its path from the root."""
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/recipes.md"])
def test_every_recipe_has_a_row(page: str) -> None:
    assert not [name for name in RECIPES if f"\n| `{name}` |" not in text(page)]


@pytest.mark.parametrize("page", ["README.md", "docs/targets.md"])
def test_every_target_is_named(page: str) -> None:
    assert not [name for name in TARGETS if f"`{name}`" not in text(page)]


def test_every_pass_has_its_place_in_the_stages() -> None:
    table = text("docs/architecture.md").partition("\n## Stages")[2].partition("\n## ")[0]
    cells = {name.strip() for line in table.splitlines() if line[:1] == "|" for name in line.split("|")[1].split(",")}
    assert not {kind.name for kind in PASSES} - cells


def test_every_load_option_is_described() -> None:
    assert not [field.name for field in fields(LoadOptions) if f"    {field.name}=" not in text("docs/python.md")]


def test_every_command_and_option_is_described() -> None:
    page = text("docs/cli.md")
    group: Any = typer.main.get_command(app())
    missing = [name for name in group.commands if f"\n## {name}\n" not in page]
    for name, command in group.commands.items():
        for option in (one for one in command.params if one.param_type_name == "option" and not one.hidden):
            if not any(re.search(f"`{spelled}[` ]", page) for spelled in (*option.opts, *option.secondary_opts)):
                missing.append(f"{name} {option.opts[0]}")
    assert len(group.commands) > 10 and not missing
