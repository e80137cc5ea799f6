"""Handlers of ATen's complex operators: rotary embeddings written as complex products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from qcompile.passes.raising import values
from qcompile.passes.raising.aten import handles
from qcompile.passes.raising.einsum import HANDLERS
from qcompile.passes.raising.nodes import Arguments
from qcompile.passes.raising.patterns import is_call, strip
from qcompile.passes.raising.raiser import Known, Opaque, Raiser
from qcompile.passes.raising.routing import overridden
from qcompile.passes.raising.values import COS, SIN, Value

__all__ = ["HANDLERS"]


@dataclass(frozen=True)
class Complex(Opaque):
    """A complex tensor; `parts` has an extra last dimension for the real and imaginary parts."""

    parts: Value


def _of(node: fx.Node, real: Value | None, imaginary: Value | None) -> Complex | None:
    if real is None or imaginary is None:
        return None
    parts = [values.unsqueeze(part, len(part.dims)) for part in (real, imaginary)]
    joined = values.concatenate(parts, len(real.dims))
    return None if joined is None else Complex(node, joined)


def _split(known: Complex) -> tuple[Value | None, Value | None]:
    last = len(known.parts.dims) - 1
    return values.select(known.parts, last, 0), values.select(known.parts, last, 1)


@handles("polar")
def _polar(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """Complex numbers of absolute value 1, given their angles."""
    size, angle = strip(a.positional[0]), r.value(a.positional[1])
    filled = is_call(size, "full", "full_like") and size.args[1] == 1
    if angle is None or not (filled or is_call(size, "ones_like") or r.number(size) == 1):
        return None
    return _of(node, values.trigonometric(angle, COS), values.trigonometric(angle, SIN))


@handles("view_as_complex")
def _view_as_complex(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    value = r.value(a.positional[0])
    return Complex(node, value) if value is not None and value.dims[-1] == "F" else None


@handles("view_as_real")
def _view_as_real(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    known = r.known.get(a.positional[0])
    return known.parts if isinstance(known, Complex) else None


@overridden("to", "_to_copy", "alias", "contiguous", "clone", "detach")
def _same(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    known = r.known.get(a.positional[0])
    alike = node.meta["val"].dtype == a.positional[0].meta["val"].dtype
    return known if isinstance(known, Complex) and alike else None


@overridden("unsqueeze")
def _unsqueeze(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    known = r.known.get(a.input_)
    if not isinstance(known, Complex):
        return None
    return Complex(node, values.unsqueeze(known.parts, a.dim % len(known.parts.dims)))


@overridden("mul", "multiply")
def _product(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """Product with a number or another complex tensor: (x + iy)(c + is) = xc - ys + i(xs + yc)."""
    left, right = (r.known.get(item) if isinstance(item, fx.Node) else item for item in a.positional[:2])
    for known, factor in ((left, a.positional[1]), (right, a.positional[0])):
        number = r.number(factor)
        if isinstance(known, Complex) and number is not None:
            return Complex(node, known.parts.scaled(number))
    if not isinstance(left, Complex) or not isinstance(right, Complex):
        return None
    (x, y), (c, s) = _split(left), _split(right)
    xc, ys, xs, yc = (_times(*pair) for pair in ((x, c), (y, s), (x, s), (y, c)))
    return _of(node, _plus(xc, None if ys is None else ys.scaled(-1.0)), _plus(xs, yc))


def _times(a: Any, b: Any) -> Value | None:
    return None if a is None or b is None else values.multiply(a, b)


def _plus(a: Any, b: Any) -> Value | None:
    return None if a is None or b is None else values.add(a, b)
