"""Passes, code generation and templates ask a format's object: no name of a format is compared outside formats/."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from qcompile.formats.activations import ACTIVATIONS
from qcompile.formats.kv import KV_FORMATS
from qcompile.formats.registry import GPU_KERNELS, WEIGHT_FORMATS

ROOT = Path(__file__).parents[2]
GPU_PACKINGS = {kernel.packing.name for kernel in GPU_KERNELS.values()}
NAMES = {*WEIGHT_FORMATS, *ACTIVATIONS, *KV_FORMATS, *GPU_KERNELS, *GPU_PACKINGS}
DTYPES = {"f32", "bf16", "int8"}
"""Names of formats that are also types of buffers, tables and machine arithmetic."""
SPECIFIC = NAMES - DTYPES
SUBJECTS = {"format", "packing", "weight", "activation", "kernel_format", "kv_format"}
"""Variables and attributes that hold the name of a format."""
CHOICES = {
    "qcompile/recipes.py": "recipes name the formats that they choose",
    "qcompile/checkpoints/stored/formats.py": "its table is keyed by what checkpoints call their formats",
    "qcompile/cli/machine.py": "its table of recipes is keyed by what checkpoints call their formats",
}
"""Files that may have tables of formats, with the reason."""

SOURCES = [
    path
    for folder in ("qcompile", "passes", "codegen", "runtime")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ROOT / "qcompile/formats" not in path.parents
]
TEMPLATES = sorted((ROOT / "codegen").rglob("templates/**/*.*"))


def texts(node: ast.AST) -> set[str]:
    """All strings in an expression."""
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def subject(node: ast.AST) -> str:
    """The last name of a variable, an attribute or a call of str()."""
    if isinstance(node, ast.Call) and node.args:
        return subject(node.args[0])
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def comparisons(text: str) -> Iterator[int]:
    """Lines that compare a format with a name, or that have a table with names of formats as keys."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            compared = set().union(*(texts(side) for side in sides))
            about = any(subject(side) in SUBJECTS for side in sides)
            if compared & SPECIFIC or (about and compared & DTYPES):
                yield node.lineno
        elif isinstance(node, ast.Dict):
            keys = set().union(*(texts(key) for key in node.keys if key is not None))
            if keys & SPECIFIC:
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            compares = node.func.attr in ("startswith", "endswith", "removesuffix")
            if compares and subject(node.func.value) in SUBJECTS:
                yield node.lineno


def tables(text: str) -> Iterator[int]:
    """Lines of constants that are collections of names of formats."""
    for node in ast.parse(text).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Tuple | ast.List | ast.Set) and texts(value) & SPECIFIC:
            yield node.lineno


@pytest.mark.parametrize(
    "text",
    [
        'if format == "mxfp4": pass',
        'x = c.format in ("bf16", "f32")',
        'x = str(format) != "f32"',
        'x = {"kv4": 1}.get(name)',
        'x = packing.removesuffix("_int8")',
        'FORMATS = ("nested_8_4", "other")',
    ],
)
def test_comparisons_are_seen(text: str) -> None:
    assert [*comparisons(text), *tables(text)]


@pytest.mark.parametrize("text", ['x = b.dtype == "f32"', 'x = {"f32": 4}[b.dtype]', 'weight: str = "mxfp4"'])
def test_types_of_buffers_and_choices_are_no_comparisons(text: str) -> None:
    assert not [*comparisons(text), *tables(text)]


def test_no_source_compares_names_of_formats() -> None:
    assert len(SOURCES) > 150
    result = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        if str(path.relative_to(ROOT)) not in CHOICES
        for line in (*comparisons(path.read_text(encoding="utf-8")), *tables(path.read_text(encoding="utf-8")))
    ]
    assert not result


def test_no_template_compares_names_of_formats() -> None:
    assert len(TEMPLATES) > 80
    names = "|".join(re.escape(name) for name in sorted(SPECIFIC, key=len, reverse=True))
    statement = re.compile(r"\{[%{](?:(?![%}]\}).)*[%}]\}", re.DOTALL)
    compared = re.compile(rf"""["']({names})["']|\b(format|packing)\b\s*(==|!=|in\b)""")
    result = [
        f"{path.relative_to(ROOT)}: {code}"
        for path in TEMPLATES
        for code in statement.findall(path.read_text(encoding="utf-8"))
        if compared.search(code)
    ]
    assert not result
