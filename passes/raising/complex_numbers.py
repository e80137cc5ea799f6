"""Rules for complex numbers: rotary embeddings written as products of complex tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder
from qcompile.passes.raising.facts import Facts, Known, Opaque
from qcompile.passes.raising.nodes import Arguments, is_call, strip
from qcompile.passes.raising.values import COS, SIN, Value


@dataclass(frozen=True)
class Complex(Opaque):
    """A complex tensor; `parts` has an extra last dimension for the real and imaginary parts."""

    parts: Value


def polar(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Complex numbers of absolute value 1, given their angles."""
    size, angle = strip(a.positional[0]), facts.value(a.positional[1])
    ones = is_call(size, "full", "full_like") and size.args[1] == 1
    if angle is None or not (ones or is_call(size, "ones_like") or facts.number(size) == 1):
        return None
    return _complex(node, values.trigonometric(angle, COS), values.trigonometric(angle, SIN))


def view_as_complex(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Pairs of features as complex numbers."""
    value = facts.value(a.positional[0])
    return Complex(node, value) if value is not None and value.dims[-1] == "F" else None


def view_as_real(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Complex numbers as pairs of features."""
    known = facts.known.get(a.positional[0])
    return known.parts if isinstance(known, Complex) else None


def copy(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """A copy of a complex tensor in its own type."""
    known = facts.known.get(a.positional[0])
    alike = node.meta["val"].dtype == a.positional[0].meta["val"].dtype
    return known if isinstance(known, Complex) and alike else None


def unsqueeze(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Tensor.unsqueeze of a complex tensor."""
    known = facts.known.get(a.input_)
    if not isinstance(known, Complex):
        return None
    return Complex(node, values.unsqueeze(known.parts, a.dim % len(known.parts.dims)))


def multiply(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Product with a number or another complex tensor: (x + iy)(c + is) = xc - ys + i(xs + yc)."""
    left, right = (facts.known.get(item) if isinstance(item, fx.Node) else item for item in a.positional[:2])
    for known, factor in ((left, a.positional[1]), (right, a.positional[0])):
        number = facts.number(factor) if isinstance(known, Complex) else None
        if isinstance(known, Complex) and number is not None:
            return Complex(node, known.parts.scaled(number))
    if not isinstance(left, Complex) or not isinstance(right, Complex):
        return None
    (x, y), (c, s) = _split(left), _split(right)
    xc, ys, xs, yc = (_times(*pair) for pair in ((x, c), (y, s), (x, s), (y, c)))
    return _complex(node, _plus(xc, None if ys is None else ys.scaled(-1.0)), _plus(xs, yc))


def _complex(node: fx.Node, real: Value | None, imaginary: Value | None) -> Complex | None:
    if real is None or imaginary is None:
        return None
    parts = [values.unsqueeze(part, len(part.dims)) for part in (real, imaginary)]
    joined = values.concatenate(parts, len(real.dims))
    return None if joined is None else Complex(node, joined)


def _split(known: Complex) -> tuple[Value | None, Value | None]:
    """The real and the imaginary part."""
    last = len(known.parts.dims) - 1
    return values.select(known.parts, last, 0), values.select(known.parts, last, 1)


def _times(a: Value | None, b: Value | None) -> Value | None:
    return None if a is None or b is None else values.multiply(a, b)


def _plus(a: Value | None, b: Value | None) -> Value | None:
    return None if a is None or b is None else values.add(a, b)
