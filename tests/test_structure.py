"""The structure of the code keeps to its bars; `python benchmarks/structure.py` prints what it is made of."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.structure import Structure, import_graph, measure

MOST_TOP_MODULES = 14
MOST_CHAIN = 14
"""Modules of the longest chain of imports. If one more is needed, let a module depend on less: on a name and its schema
instead of what defines it, on an object that it is given instead of what makes it."""


@pytest.fixture(scope="module")
def structure() -> Structure:
    return measure()


def test_few_modules_stand_directly_in_the_package(structure: Structure) -> None:
    assert len(structure.top_modules) <= MOST_TOP_MODULES, structure.top_modules


def test_chains_of_imports_are_short(structure: Structure) -> None:
    assert len(structure.chain) <= MOST_CHAIN, " -> ".join(structure.chain)


def test_modules_do_not_import_each_other(structure: Structure) -> None:
    assert not structure.cycles


def test_functions_are_short(structure: Structure) -> None:
    assert not structure.long_functions


def test_functions_have_few_parameters_or_a_written_reason(structure: Structure) -> None:
    assert not structure.parameters


def test_classes_are_short(structure: Structure) -> None:
    assert not structure.long_classes


def test_a_class_name_means_one_thing(structure: Structure) -> None:
    assert not structure.shared_names


def test_the_script_runs_from_any_folder(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "structure.py"
    done = subprocess.run([sys.executable, script, "--json"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["cycles"] == []


def test_imports_of_all_kinds_are_seen() -> None:
    trees = {
        "qcompile": "from qcompile.a import x",
        "qcompile.a": "def late():\n    from qcompile import b",
        "qcompile.b": "if TYPE_CHECKING:\n    from qcompile.a import y",
        "qcompile.c": "import qcompile.b\nimport qcompile",
    }
    graph = import_graph({name: ast.parse(text) for name, text in trees.items()})
    edges = {("qcompile", "qcompile.a"), ("qcompile.a", "qcompile.b"), ("qcompile.b", "qcompile.a")}
    assert set(graph.edges) == edges | {("qcompile.c", "qcompile.b")}
