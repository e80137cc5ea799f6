"""The environment variables that give options their values: QCOMPILE_ and the option's name."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import OptionInfo

from qcompile.errors import UsageError

PREFIX = "QCOMPILE_"
DEBUG = f"{PREFIX}DEBUG"
REQUIRE_SIGNATURE = f"{PREFIX}REQUIRE_SIGNATURE"
_TRUE = ("1", "true", "t", "yes", "y", "on")


def with_variable(annotation: Any) -> Any:
    """The annotation of a command's parameter; if it is an option, its environment variable sets it."""
    option = _option_of(annotation)
    if option is not None and option.envvar is None and (name := variable(option)) is not None:
        option.envvar, option.show_envvar = name, False  # docs/environment.md lists them all
    return annotation


def variable(option: OptionInfo) -> str | None:
    """`--max-tokens` as QCOMPILE_MAX_TOKENS; None for an option without a long name."""
    name = long_name(option)
    return None if name is None else PREFIX + name.replace("-", "_").upper()


def long_name(option: OptionInfo) -> str | None:
    """The first long name of an option, without `--`; None if it has none."""
    # typer keeps the first of the names of an annotated option as its default.
    for names in (option.default, *(option.param_decls or ())):
        name = str(names).partition("/")[0]
        if name.startswith("--"):
            return name.removeprefix("--")
    return None


@functools.cache
def _variables(group: type) -> Mapping[str, str]:
    """The variable of each field of a group of options."""
    hints = get_type_hints(group, include_extras=True)
    options = {field.name: _option_of(hints[field.name]) for field in fields(group)}
    return {name: value for name, option in options.items() if option and (value := variable(option))}


def sets(group: type, field: str) -> bool:
    """Whether the environment sets an option: it may not concern this command, in contrast to one that is written."""
    return bool(os.environ.get(_variables(group).get(field, "")))


def check_not_empty(name: str) -> None:
    """Raise UsageError if the variable of an option that protects is there but empty: typer would ignore it."""
    if os.environ.get(name, "set").strip() == "":
        raise UsageError(f"{name} is empty: set it, or unset it")


def is_on(name: str) -> bool:
    """Whether a flag's variable is set, as the command line reads it."""
    return os.environ.get(name, "").strip().lower() in _TRUE


def _option_of(annotation: Any) -> OptionInfo | None:
    if get_origin(annotation) is not Annotated:
        return None
    return next((part for part in get_args(annotation)[1:] if isinstance(part, OptionInfo)), None)
