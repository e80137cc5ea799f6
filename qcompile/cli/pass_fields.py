"""The passes' fields and their defaults, read from the passes' source: importing them would wait for torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from qcompile import passes


@cache
def pass_fields() -> dict[str, dict[str, object]]:
    """Default values by the names of passes and fields. A default is a literal, or a constant of the pass's module."""
    folder = Path(passes.__path__[0])
    sources = (path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))
    fields: dict[str, dict[str, object]] = {}
    for tree in (ast.parse(source) for source in sources if "(Pass):" in source):
        constants = dict(_constants(tree.body))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.bases:
                values = dict(_fields(node.body, constants))
                if "name" in values:
                    fields[str(values.pop("name"))] = values
    return fields


def _constants(statements: list[ast.stmt]) -> Iterator[tuple[str, Any]]:
    """The literals that a module assigns to names."""
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            with suppress(ValueError):  # what is computed is no default of a field
                yield statement.targets[0].id, ast.literal_eval(statement.value)


def _fields(statements: list[ast.stmt], constants: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a class with their defaults. Class variables are no fields, but for the pass's `name`."""
    for statement in statements:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value):
            continue
        name, value = statement.target.id, statement.value
        if name == "name" or "ClassVar" not in ast.unparse(statement.annotation):
            yield name, constants[value.id] if isinstance(value, ast.Name) else ast.literal_eval(value)
