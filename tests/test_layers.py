"""Imports point down: pipeline -> passes, codegen -> core; runtime -> core; core -> nothing above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("passes", "codegen", "runtime")


def imports(path: Path) -> set[str]:
    """Names of qcompile modules that a file imports, at any depth of its code, type checking left out."""
    result: set[str] = set()
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if node in skipped:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
        elif isinstance(node, ast.Import):
            result.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            result.add(node.module)
            result.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in result if name.split(".")[0] == "qcompile"}


def layer(module: str) -> str:
    """`passes`, `codegen`, `runtime`, `pipeline`, `front` or `core` of a dotted module name."""
    parts = module.split(".")
    second = parts[1] if len(parts) > 1 else "core"
    if second in ("pipeline", "drafts"):
        return "pipeline"
    if second in LAYERS:
        return second
    return "front" if second in ("cli", "deploy", "__main__", "__init__") else "core"


ALLOWED = {
    "core": {"core"},
    "passes": {"core", "passes"},
    "codegen": {"core", "codegen"},
    "runtime": {"core", "runtime"},
    "pipeline": {"core", "passes", "codegen", "pipeline"},
    "front": {"core", "front", "passes", "pipeline", "runtime"},
}
FILES = [p for folder in ("qcompile", *LAYERS) for p in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    """The dotted name of a module by its file; the package itself is `qcompile.__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "qcompile" else ("qcompile", *parts))
    return name if name == "qcompile.__init__" else name.removesuffix(".__init__")


def test_all_files_are_seen() -> None:
    assert len(FILES) > 170 and {layer(module_of(path)) for path in FILES} == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    own = layer(module_of(path))
    above = {name for name in imports(path) if layer(name) not in ALLOWED[own]}
    assert not above, f"{own} may not import {sorted(above)}"


def test_layers_are_relative_symlinks() -> None:
    for name in LAYERS:
        link = ROOT / "qcompile" / name
        assert link.is_symlink() and str(link.readlink()) == f"../{name}"


def test_the_runtime_loads_without_torch() -> None:
    code = "import sys, qcompile; qcompile.load, qcompile.SamplingParams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
