"""What the source of a loop says about the list of its results, and about what it goes through."""

from __future__ import annotations

import ast

import pytest

from qcompile.checkpoints import loop_syntax


def loop(body: str) -> ast.For:
    (node,) = ast.parse(f"for t in range(n):\n    {body}").body
    assert isinstance(node, ast.For)
    return node


@pytest.mark.parametrize("body", ["out.append(h)", "out += [h]", "if h: out.append(h)", "other = outer", "h = f(h)"])
def test_a_list_to_which_a_loop_appends(body: str) -> None:
    assert loop_syntax.only_appends(loop(body), "out")


@pytest.mark.parametrize(
    "body",
    [
        *("len(out)", "x = out[5:]", "f(out)", "out.pop()", "out.append(out)", "x = out.append(h)", "out *= 2"),
        *("h = [x for x in out]", "f = lambda: out", "out = [*out, h]", "out.append(len(out))", "x = out.append"),
        *("out.extend(h)", "del out[0]", "while out: pass", "out[0] = h"),
    ],
)
def test_a_list_that_a_loop_uses_otherwise(body: str) -> None:
    assert not loop_syntax.only_appends(loop(body), "out")


@pytest.mark.parametrize(
    ("iterated", "count"),
    [
        ("range(x.shape[1])", 1),
        ("x.unbind(1)", 1),
        ("zip(q.unbind(1), k.unbind(1), strict=True)", 2),
        ("enumerate(zip(range(n), v.unbind(1)))", 2),
        ("zip(q.unbind(1), decays)", None),
        ("reversed(range(n))", None),
        ("tokens", None),
        ("self.tokens(x)", None),
    ],
)
def test_how_many_iterators_a_loop_goes_through(iterated: str, count: int | None) -> None:
    assert loop_syntax.goes_through(ast.parse(iterated, mode="eval").body) == count
