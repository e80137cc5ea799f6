"""TOML of recipes: reading a file, and writing what Python's own reader reads back alike."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qcompile.artifact.plain_files import open_plain
from qcompile.errors import UsageError

_BARE = re.compile(r"[A-Za-z0-9_-]+")
MOST_BYTES = 1 << 20
"""Size of a recipe file; a larger one is something else."""


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. Raises UsageError naming it and what is wrong."""
    try:
        if path.is_dir():
            raise UsageError(f"recipe {path} is a folder: give a file of it, such as {path / 'recipe.toml'}")
        with open_plain(path) as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise UsageError(f"recipe {path}: more than {MOST_BYTES >> 20} MiB, which no recipe has")
        return tomllib.loads(text.decode())
    except FileNotFoundError:
        raise UsageError(f"recipe {path}: there is no such file") from None
    except OSError as error:
        raise UsageError(f"recipe {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"recipe {path} is not TOML: {str(error) or 'nested too deeply'}") from None


def read_value(text: str) -> Any:
    """A value of TOML, such as `{role = "down", weight = "bf16"}`. Raises ValueError."""
    tables = tomllib.loads(f"value = {text}\n")
    if list(tables) != ["value"]:
        raise ValueError("more than one value")
    return tables["value"]


def toml_lines(tables: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[str]:
    """Lines of TOML for texts, numbers, truths, lists of them and tables; a table's own values come first."""
    for name, value in tables.items():
        if not isinstance(value, Mapping):
            yield f"{_key(name)} = {_value(value)}"
    for name, value in tables.items():
        if isinstance(value, Mapping):
            inner = (*place, name)
            if any(not isinstance(each, Mapping) for each in value.values()):
                yield ""
                yield f"[{'.'.join(map(_key, inner))}]"
            yield from toml_lines(value, inner)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
