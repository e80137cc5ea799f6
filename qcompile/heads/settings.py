"""Settings in a head's config.json, each checked for type and range before it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcompile.errors import UsageError
from qcompile.heads.layout import CONFIG

_MOST = 1 << 20


@dataclass(frozen=True)
class HeadSettings:
    """The content of the config.json of the head in `path`. A setting that is null counts as missing."""

    path: Path
    config: Mapping[str, Any]

    def whole(self, name: str, default: int | None = None) -> int:
        """A number of 1 or more. Raises UsageError for anything else, and if it is missing without a `default`."""
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
            raise self.wrong(name, value, f"a number from 1 to {_MOST:,}")
        return value

    def real(self, name: str, default: float) -> float:
        """A finite number above 0. Raises UsageError for anything else."""
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(name, value, "a finite number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false, which a missing one is. Raises UsageError for anything else."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def rising(self, name: str, of: Mapping[str, Any]) -> tuple[int, ...]:
        """A list of different whole numbers in rising order, from `of`; none if it is missing.

        Raises UsageError for anything else.
        """
        value = of.get(name)
        if value is None:
            return ()
        whole = isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
        if not whole or value != sorted(set(value)):
            raise self.wrong(name, value, "a list of numbers in rising order")
        return tuple(value)

    def wrong(self, name: str, value: Any, wanted: str) -> UsageError:
        """The error for a setting that is not as `wanted`."""
        return UsageError(f"{self.path / CONFIG}: {name} is {str(value)[:60]!r}, not {wanted}")
