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


def variables() -> str:
    """The rows of the table of environment variables in docs/environment.md."""
    group: Any = typer.main.get_command(app())
    rows: dict[tuple[str, str], list[str]] = {}
    waiting = [("", group)]
    while waiting:
        path, node = waiting.pop(0)
        waiting += [(f"{path} {name}".strip(), inner) for name, inner in getattr(node, "commands", {}).items()]
        for option in (one for one in node.params if one.envvar):
            spelled = max((*option.opts, *option.secondary_opts), key=lambda name: name.startswith("--"))
            rows.setdefault((option.envvar, spelled), []).append(f"`{path}`" if path else "all")
    return "\n".join(
        f"| `{name}` | `{option}` | {'all' if '`build`' in users and '`passes`' in users else ', '.join(users)} |"
        for (name, option), users in sorted(rows.items())
    )


def test_every_environment_variable_of_an_option_is_listed() -> None:
    """The table holds these rows, and no others; if it does not, the difference shows what to write there."""
    lines = text("docs/environment.md").splitlines()
    assert [line for line in lines if line.startswith("| `QCOMPILE_") and "| `--" in line] == variables().splitlines()


def test_every_option_has_an_environment_variable() -> None:
    group: Any = typer.main.get_command(app())
    nodes = [*group.commands.values(), *group.commands["cache"].commands.values()]
    options = [option for node in nodes for option in node.params if option.param_type_name == "option"]
    assert len(options) > 100 and not [option.opts for option in options if not option.envvar]


def test_every_command_and_option_is_described() -> None:
    page = text("docs/cli.md")
    group: Any = typer.main.get_command(app())
    missing = [name for name in group.commands if f"\n## {name}\n" not in page]
    for name, command in group.commands.items():
        for option in (one for one in command.params if one.param_type_name == "option" and not one.hidden):
            if not any(re.search(f"`{spelled}[` ]", page) for spelled in (*option.opts, *option.secondary_opts)):
                missing.append(f"{name} {option.opts[0]}")
    assert len(group.commands) > 10 and not missing


def test_files_that_examples_read_are_shipped() -> None:
    """What commands and programs of the documentation, and of `--help`, read as data: they can be pasted and run."""
    sources = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "qcompile" / "cli").glob("*.py")]
    read = re.compile(r"""(?:--calib|--data|--prompts|run-batch \S+|perplexity\(|calib=)[ "]*([\w./-]+\.jsonl)""")
    result = {(path.name, name) for path in sources for name in read.findall(path.read_text(encoding="utf-8"))}
    assert len(result) > 8 and not [each for each in result if not (ROOT / each[1]).is_file()]
