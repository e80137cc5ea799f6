"""Measures of the code's structure: imports, sizes of functions and classes, and names that mean two things."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[2]
FOLDERS = ("qcompile", "passes", "codegen", "runtime")
MOST_LINES = 60
"""Lines of a function."""
MOST_PARAMETERS = 8
"""Parameters of a function, `self` and `cls` not counted."""
MOST_CLASS_LINES = 300
REASON = "# parameters:"
"""Begins the comment, on the line of `def` or the line above, that says why a function has more parameters."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_of(path: Path) -> str:
    """The dotted name of a module by its file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "qcompile" else ("qcompile", *parts))
    return name.removesuffix(".__init__")


def sources() -> dict[str, Path]:
    """The file of each module by its dotted name."""
    return {module_of(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}


@dataclass(frozen=True)
class Place:
    """A function or class of a module, and its size: lines, or number of parameters."""

    module: str
    name: str
    size: int


@dataclass(frozen=True)
class Structure:
    """What the project's code is made of.

    `top_modules` are the modules directly in qcompile/, `chain` is a longest chain of imports, and `cycles` are groups
    of modules that import each other; imports within functions and under TYPE_CHECKING count. `parameters` are
    functions with too many parameters and no written reason. `shared_names` maps a class name to the modules that
    define it, if there are several.
    """

    top_modules: list[str]
    chain: list[str]
    cycles: list[list[str]]
    long_functions: list[Place]
    parameters: list[Place]
    long_classes: list[Place]
    shared_names: dict[str, list[str]]


def measure() -> Structure:
    """The structure of the code as it is now."""
    paths = sources()
    trees = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in paths.items()}
    graph = import_graph(trees)
    cycles = [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1]
    condensed = nx.condensation(graph)
    chain = [min(condensed.nodes[node]["members"]) for node in nx.dag_longest_path(condensed)]
    functions = [(module, node) for module, tree in trees.items() for node in _nodes(tree, Function)]
    classes = [(module, node) for module, tree in trees.items() for node in _nodes(tree, ast.ClassDef)]
    lines = {module: path.read_text(encoding="utf-8").splitlines() for module, path in paths.items()}
    return Structure(
        sorted(module for module, path in paths.items() if path.parent == ROOT / "qcompile"),
        chain,
        sorted(cycles),
        _over(((module, node.name, _lines(node)) for module, node in functions), MOST_LINES),
        _over(
            (
                (module, node.name, _parameters(node))
                for module, node in functions
                if not _has_reason(node, lines[module])
            ),
            MOST_PARAMETERS,
        ),
        _over(((module, node.name, _lines(node)) for module, node in classes), MOST_CLASS_LINES),
        _shared(classes),
    )


def import_graph(trees: dict[str, ast.Module]) -> nx.DiGraph:
    """An edge from each module to each module of the project that it imports anywhere in its code.

    The package itself, which imports its public names on first use, is not a target.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(trees)
    for module, tree in trees.items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in trees else node.module for name in inner]
            edges = [(module, name) for name in names if name in trees and name not in (module, "qcompile")]
            graph.add_edges_from(edges)
    return graph


def _nodes(tree: ast.Module, kind: type | object) -> Iterator:  # type: ignore[type-arg]
    return (node for node in ast.walk(tree) if isinstance(node, kind))  # type: ignore[arg-type]


def _lines(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _parameters(node: Function) -> int:
    listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len(listed) - (bool(listed) and listed[0].arg in ("self", "cls"))


def _has_reason(node: Function, lines: list[str]) -> bool:
    return any(REASON in line for line in lines[max(node.lineno - 2, 0) : node.lineno])


def _over(places: Iterator[tuple[str, str, int]], most: int) -> list[Place]:
    result = [Place(*place) for place in places if place[2] > most]
    return sorted(result, key=lambda place: (-place.size, place.module, place.name))


def _shared(classes: list[tuple[str, ast.ClassDef]]) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = defaultdict(list)
    for module, node in classes:
        modules[node.name].append(module)
    return {name: sorted(places) for name, places in sorted(modules.items()) if len(places) > 1}
