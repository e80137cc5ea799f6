"""What the source of a loop says: which loop a frame runs, what it iterates over, and how it uses a list."""

from __future__ import annotations

import ast
import functools
import linecache
from types import FrameType


@functools.lru_cache(maxsize=64)
def _loops(filename: str) -> tuple[ast.For, ...]:
    """All for loops of a file; none if its source is not known."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.For))


def running(frame: FrameType) -> list[ast.For]:
    """The loop of which `frame` takes the next value; several, if they begin in the same line."""
    line = frame.f_lineno
    return [
        loop for loop in _loops(frame.f_code.co_filename) if loop.iter.lineno <= line <= (loop.iter.end_lineno or line)
    ]


def only_appends(loop: ast.For, name: str) -> bool:
    """Whether the body of `loop` uses the variable `name` only in statements `name.append(...)` and `name += ...`."""
    appending: set[int] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
            method = call.func
            if isinstance(method, ast.Attribute) and method.attr == "append":
                appending.add(id(method.value))
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            appending.add(id(node.target))
    uses = [node for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Name) and node.id == name]
    return all(id(node) in appending for node in uses)


def goes_through(iterated: ast.expr) -> int | None:
    """How many iterators an expression combines, each of a range or of parts that unbind gives; None: not known."""
    if not isinstance(iterated, ast.Call):
        return None
    if isinstance(iterated.func, ast.Attribute):
        return 1 if iterated.func.attr == "unbind" else None
    name = iterated.func.id if isinstance(iterated.func, ast.Name) else ""
    if name == "range":
        return 1
    if name not in ("zip", "enumerate"):
        return None
    parts = [goes_through(part) for part in (iterated.args if name == "zip" else iterated.args[:1])]
    return None if None in parts else sum(part for part in parts if part)
