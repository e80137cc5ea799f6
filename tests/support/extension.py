"""The package of samples/extension, installed for tests of this process as pip would install it."""

from __future__ import annotations

import importlib
import shutil
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qcompile.formats.registry import STORED_FORMATS, WEIGHT_FORMATS
from qcompile.plugins.entries import entries

PACKAGE = Path(__file__).parents[2] / "samples" / "extension"


def write_metadata(site: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """The metadata of a package with entry points, in the folder `site`."""
    folder = site / f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{point} = {place}" for point, place in points.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


@contextmanager
def on_path(site: Path) -> Iterator[None]:
    """Packages in the folder `site` can be imported, and their entry points are seen; all is undone at the end."""
    modules, formats = set(sys.modules), set(WEIGHT_FORMATS)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    entries.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(site))
        for name in set(sys.modules) - modules:
            if str(site) in str(getattr(sys.modules[name], "__file__", None)):
                del sys.modules[name]
        for name in set(WEIGHT_FORMATS) - formats:
            del WEIGHT_FORMATS[name], STORED_FORMATS[name]
        entries.cache_clear()


@contextmanager
def installed_extension(site: Path) -> Iterator[None]:
    """`on_path`, with the package of samples/extension."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.copytree(PACKAGE / "qcompile_example", site / "qcompile_example")
    write_metadata(site, project["name"], project["entry-points"])
    with on_path(site):
        yield
