"""Entry points of installed packages: `qcompile.passes`, `qcompile.recipes` and `qcompile.formats`.

Names are known without importing a package; only what a build asks for is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from qcompile.errors import UsageError

Group = Literal["qcompile.passes", "qcompile.recipes", "qcompile.formats"]
GROUPS: tuple[Group, ...] = ("qcompile.passes", "qcompile.recipes", "qcompile.formats")


@dataclass(frozen=True)
class PluginEntry:
    """An entry point, with the package that has it."""

    point: EntryPoint

    @property
    def package(self) -> str:
        """Name and version of the package."""
        return f"{self.point.dist.name} {self.point.dist.version}" if self.point.dist else "an unknown package"

    def load(self) -> Any:
        """What it names. Raises UsageError if importing that fails, for whatever reason."""
        try:
            return self.point.load()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UsageError(f"{self}: {self.point.value} cannot be imported ({reason}): mend or remove it") from error

    def __str__(self) -> str:
        return f"entry point {self.point.name} of {self.point.group} in {self.package}"


@cache
def entries(group: Group) -> dict[str, PluginEntry]:
    """The entry points of a group by name. Raises UsageError for a name that two packages use."""
    by_name: dict[str, PluginEntry] = {}
    for point in entry_points(group=group):
        entry = PluginEntry(point)
        other = by_name.setdefault(point.name, entry)
        if other.point.value != point.value:
            raise UsageError(f"{entry}: {other.package} has one of this name, too: remove one of them")
    return by_name


def installed() -> list[str]:
    """All entry points, each with package and version: what results may depend on beside qcompile itself."""
    return sorted(f"{group} {name} {entry.package}" for group in GROUPS for name, entry in entries(group).items())
