"""The check of source distribution and wheel notices what is missing, and versions agree."""

from __future__ import annotations

import importlib.util
import io
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import qcompile

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """The script .ci/check_wheel.py as a module."""
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / ".ci" / "check_wheel.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sdist(path: Path, names: set[str], links: set[str]) -> Path:
    """A source distribution with empty files `names` and symbolic links `links`."""
    with tarfile.open(path, "w:gz") as archive:
        for name in names | links:
            member = tarfile.TarInfo(f"qcompile-1/{name}")
            member.type = tarfile.SYMTYPE if name in links else tarfile.REGTYPE
            archive.addfile(member, io.BytesIO())
    return path


def wheel(path: Path, names: set[str]) -> Path:
    """A wheel with empty files `names`."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def test_the_package_has_all_kinds_of_files(check: ModuleType) -> None:
    files = check.files_below(ROOT / "qcompile") | check.files_below(ROOT / "codegen")
    assert {"qcompile/py.typed", "qcompile/passes", "qcompile/report/page.html.jinja"} <= files
    assert {"codegen/cpu/templates/model.cpp.jinja", "codegen/gpu/templates/gemm.py.jinja"} <= files
    assert not [name for name in files if "__pycache__" in name or name.startswith("qcompile/passes/")]


def test_every_data_file_is_declared(check: ModuleType) -> None:
    declared: set[str] = set()
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    for package, patterns in data.items():
        folder = ROOT.joinpath(*package.split("."))
        declared |= {path.resolve().relative_to(ROOT).as_posix() for one in patterns for path in folder.glob(one)}
    files = set().union(*(check.files_below(ROOT / folder) for folder in ("qcompile", *check.LAYERS)))
    links = {f"qcompile/{layer}" for layer in check.LAYERS}
    assert {name for name in files - links if not name.endswith(".py")} <= declared


def test_a_file_that_the_wheel_lacks_is_noticed(check: ModuleType, tmp_path: Path) -> None:
    links = {f"qcompile/{layer}" for layer in check.LAYERS}
    names = check.files_below(ROOT / "qcompile") - links
    names |= {f"qcompile/{name}" for layer in check.LAYERS for name in check.files_below(ROOT / layer)}
    assert check.missing_from_wheel(wheel(tmp_path / "whole.whl", names)) == set()
    lost = {"qcompile/py.typed", "qcompile/codegen/cpu/templates/model.cpp.jinja"}
    assert check.missing_from_wheel(wheel(tmp_path / "part.whl", names - lost)) == lost


def test_a_file_or_link_that_the_sdist_lacks_is_noticed(check: ModuleType, tmp_path: Path) -> None:
    names = set(check.SINGLE).union(*(check.files_below(ROOT / folder) for folder in check.NEEDED))
    links = {f"qcompile/{layer}" for layer in check.LAYERS}
    assert check.missing_from_sdist(sdist(tmp_path / "whole.tar.gz", names - links, links)) == set()
    lost = {"tests/support/graphs.py", "Makefile"}
    assert check.missing_from_sdist(sdist(tmp_path / "part.tar.gz", names - links - lost, links)) == lost
    copied = sdist(tmp_path / "copied.tar.gz", names - links | {"qcompile/passes"}, links - {"qcompile/passes"})
    assert check.missing_from_sdist(copied) == {"qcompile/passes"}


def test_the_changelog_starts_with_this_version() -> None:
    versions = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert next(version for version in versions if version != "Unreleased") == qcompile.__version__
