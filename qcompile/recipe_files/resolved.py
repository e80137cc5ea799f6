"""A recipe with all that a user changes of it: options of passes, the output head, and rules for some linears.

base = "w4a8"                  # a recipe by name; default w4a8
kv = "kv8"                     # weight, activation, kv, head, embedding: the formats of the whole model
passes = ["mine:Widen@after=rotate"]

[options]
rotate.enabled = true          # fields of passes, as --set has them

[rules.first_down]
role = "down"
layers = "first 2, last 2"
weight = "w8_sym_channel"
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.errors import UsageError, shown, suggestion
from qcompile.plugins.entries import PluginEntry, entries
from qcompile.recipe_files.rules import Rule, rule_of
from qcompile.recipe_files.toml import read_toml, read_value, toml_lines
from qcompile.recipes import RECIPES, Recipe, RecipeDraft, Settings, get_recipe, option_texts

if TYPE_CHECKING:
    from qcompile.recipe_files.mixes import StudiedMixes

RECIPE_FILE = "recipe.toml"
"""The file of an artifact with its recipe."""
_FORMATS = {
    "weight": "assign_precision.weight",
    "activation": "assign_precision.activation",
    "embedding": "assign_precision.embedding",
    "kv": "cache.format",
}
"""Options that have a key of their own."""
_KEYS = ("base", "name", "description", *_FORMATS, "head", "passes", "options", "rules", "study")
_RULES = "rules."


@dataclass(frozen=True)
class Resolved:
    """The recipe `base`, changed by `options` (texts by pass.field), `head_dtype` (None: the base's) and `rules`.

    `passes` name passes of other packages and their places, as passes/extra.py reads them. `name` and `description` are
    the base's unless the recipe has its own. `study` has the mixes of formats that the rules were chosen from,
    if a study of sensitivity chose them.
    """

    base: Recipe
    name: str
    description: str
    options: tuple[tuple[str, str], ...] = ()
    head_dtype: str | None = None
    rules: tuple[Rule, ...] = ()
    passes: tuple[str, ...] = ()
    study: StudiedMixes | None = None

    @property
    def calibrated(self) -> bool:
        """Whether it needs calibration text."""
        return self.base.calibrated

    @property
    def drafts(self) -> tuple[RecipeDraft, ...]:
        """The drafts of the base."""
        return self.base.drafts

    @property
    def head(self) -> str:
        """The output head, a key of recipes.HEADS."""
        return self.head_dtype or self.base.head

    @property
    def is_plain(self) -> bool:
        """Whether the base's name, options and the head say all of it, as the command line can give it."""
        return not self.rules and not self.passes and self.name == self.base.name

    def settings(self, kind: str = "cpu") -> Settings:
        """The settings of passes for targets of `kind` (cpu or cuda), without `options`, which override them."""
        rules: Settings = {"rules": {"rules": self.rules}} if self.rules else {}
        return self.base.settings(self.head_dtype, kind) | rules

    def changed(
        self, options: Mapping[str, object], head_dtype: str | None = None, passes: Sequence[str] = ()
    ) -> Resolved:
        """The recipe with further options, which may be values and `rules.NAME` or `rules.NAME.KEY`, a head, passes."""
        rules = {rule.name: rule.table for rule in self.rules}
        texts = option_texts(options)
        for option, text in texts.items():
            if option.startswith(_RULES):
                _set_rule(rules, option.removeprefix(_RULES), option, text)
        own = {option: text for option, text in texts.items() if not option.startswith(_RULES)}
        kept = {option: text for option, text in self.options if option not in own}
        return replace(
            self,
            options=tuple((kept | own).items()),
            head_dtype=head_dtype or self.head_dtype,
            rules=tuple(rule_of(name, table) for name, table in rules.items()),
            passes=(*self.passes, *passes),
        )

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the recipe."""
        facts: dict[str, Any] = {"name": self.name, "options": dict(self.options), "head_dtype": self.head_dtype}
        facts |= {"base": self.base.name} if self.name != self.base.name else {}
        facts |= {"passes": list(self.passes)} if self.passes else {}
        return facts | ({"rules": {rule.name: rule.table for rule in self.rules}} if self.rules else {})

    def text(self) -> str:
        """The recipe as a file, from which `recipe_file` makes the same one."""
        tables: dict[str, Any] = {"base": self.base.name, "name": self.name, "description": self.description}
        tables |= {} if self.head_dtype is None else {"head": self.head_dtype}
        tables["passes"] = list(self.passes)
        tables["options"] = {option: _typed(text) for option, text in self.options}
        tables["rules"] = {rule.name: rule.table for rule in self.rules}
        tables["study"] = self.study.table if self.study else {}
        return "\n".join(toml_lines({key: value for key, value in tables.items() if value})) + "\n"


RecipeLike = str | Path | Mapping[str, Any] | Resolved
"""The name of a recipe, its TOML file, the tables of such a file, or a recipe."""


def resolve(
    recipe: RecipeLike,
    options: Mapping[str, object] | None = None,
    head_dtype: str | None = None,
    passes: Sequence[str] = (),
) -> Resolved:
    """`recipe` with `options` of passes, `head_dtype` and `passes` of other packages. Raises UsageError."""
    if isinstance(recipe, Resolved):
        resolved = recipe
    elif isinstance(recipe, Mapping):
        resolved = recipe_of(recipe, "recipe", "own")
    elif isinstance(recipe, Path) or _is_file(recipe):
        resolved = recipe_file(Path(recipe))
    elif recipe not in RECIPES and recipe in entries("qcompile.recipes"):
        resolved = _installed(entries("qcompile.recipes")[recipe])
    else:
        base = get_recipe(recipe)
        resolved = Resolved(base, base.name, base.description)
    return resolved.changed(options or {}, head_dtype, passes)


def _installed(entry: PluginEntry) -> Resolved:
    """The recipe of another package: the path of a file, or its tables. Raises UsageError."""
    given = entry.load()
    if not isinstance(given, str | Path | Mapping):
        raise UsageError(f"{entry}: {shown(given)} is neither the path of a recipe nor its tables")
    tables = given if isinstance(given, Mapping) else read_toml(Path(given))
    return recipe_of(tables, str(entry), entry.point.name)


def recipe_file(path: Path) -> Resolved:
    """The recipe in a TOML file; its name is the file's unless it says otherwise. Raises UsageError."""
    return recipe_of(read_toml(path), f"recipe {path}", path.stem)


def recipe_of(tables: Mapping[str, Any], place: str, name: str) -> Resolved:
    """The recipe that `tables` describe; messages begin with `place`, and `name` is its name if they have none."""
    for key in tables:
        if key not in _KEYS:
            hint = suggestion(str(key), _KEYS)
            raise UsageError(f"{place}: {key} is unknown; there are {', '.join(_KEYS)}{hint}")
    for key in ("base", "name", "description", "head", *_FORMATS):
        given = tables.get(key, "-")
        if not isinstance(given, str) or not given or not given.isprintable():
            raise UsageError(f"{place}: {key} must be a text of one line, not {shown(given)}")
    for key in ("options", "rules"):
        if not isinstance(tables.get(key, {}), Mapping):
            raise UsageError(f"{place}: {key} must be a table, not {shown(tables[key])}")
    try:
        base = get_recipe(tables.get("base", "w4a8"))
        name = tables.get("name", name)
        if name in RECIPES and name != base.name:
            raise UsageError(f"{name} is the name of another recipe: write name = ...")
        options = dict(_formats_of(tables)) | _flat(tables.get("options", {}))
        own = Resolved(base, name, tables.get("description", base.description))
        rules = {f"{_RULES}{rule}": table for rule, table in tables.get("rules", {}).items()}
        study = _study(tables["study"]) if "study" in tables else None
        own = replace(own, passes=_passes(tables.get("passes", [])), study=study)
        made = replace(own, rules=tuple(rule_of(rule.removeprefix(_RULES), table) for rule, table in rules.items()))
        changed = made.changed(options, tables.get("head"))
        changed.settings()  # refuses an unknown head
        return changed
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None


def _study(table: object) -> StudiedMixes:
    from qcompile.recipe_files.mixes import mixes_of  # most recipes have none: `--help` imports little

    return mixes_of(table)


def _passes(given: object) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(one, str) and one.isprintable() for one in given):
        raise UsageError(f"passes must be a list of texts, such as module:Class@after=rotate, not {shown(given)}")
    return tuple(given)


def _is_file(recipe: str) -> bool:
    """Whether a text means a file and not the name of a recipe."""
    return recipe not in RECIPES and (recipe.endswith(".toml") or os.sep in recipe or Path(recipe).is_file())


def _formats_of(tables: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """The options that keys of their own set."""
    return ((option, tables[key]) for key, option in _FORMATS.items() if key in tables)


def _flat(options: Mapping[str, Any], place: str = "") -> dict[str, str | bool | int | float]:
    """Options in tables by pass, or with dots in their names. Raises UsageError for an option that occurs twice."""
    flat: dict[str, str | bool | int | float] = {}
    for name, value in options.items():
        option = f"{place}{name}"
        if option.startswith(_RULES):
            raise UsageError(f"option {option}: rules stand in tables of their own, [rules.NAME]")
        given = _flat(value, f"{option}.") if isinstance(value, Mapping) else {option: value}
        twice = flat.keys() & given.keys()
        if twice:
            raise UsageError(f"option {twice.pop()} occurs twice")
        flat |= given
    return {option: str(value).lower() if isinstance(value, bool) else value for option, value in flat.items()}


def _set_rule(rules: dict[str, dict[str, Any]], name: str, option: str, text: str) -> None:
    """Set rule `name` to the table `text`, or the key of a rule, as `first_down.weight`, to the text."""
    rule, dot, key = name.rpartition(".")
    try:
        if dot:
            rules[rule] = rules.get(rule, {}) | {key: _value_of(text)}
        else:
            rules[name] = read_value(text)
    except ValueError:
        example = f'{_RULES}{name}={{role = "down", layers = "first 2", weight = "w8_sym_channel"}}'
        raise UsageError(f"option {option}={text}: write a table of TOML, for example {example}") from None


def _value_of(text: str) -> Any:
    """`text` as a list or number of TOML if it is one; else as a text, which needs no quotes here."""
    try:
        value = read_value(text)
    except ValueError:
        return text
    return value if isinstance(value, str | list | int) else text


def _typed(text: str) -> str | bool | int | float:
    """An option's text as the value of TOML that is written alike, if there is one."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            if str(kind(text)) == text and text.lower().strip("-") not in ("inf", "nan"):
                return kind(text)
        except ValueError:
            continue
    return text
