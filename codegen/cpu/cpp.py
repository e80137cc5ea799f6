"""C++ literals and identifiers."""

from __future__ import annotations

import re
import struct

from qcompile.codegen.buffers import Buffer
from qcompile.formats.activations import ActivationFormat


def rows_kind(buffer: Buffer) -> str:
    """The C++ constant for the kind of rows that a buffer has."""
    return {"tokens": "kTokens", "outputs": "kOutputs"}[buffer.rows]


def boolean(value: bool) -> str:
    """A C++ truth value."""
    return "true" if value else "false"


def ident(name: str) -> str:
    """A C++ identifier for a buffer."""
    return "v_" + re.sub(r"\W", "_", name)


def unary_kind(kind: str) -> str:
    """The enumerator in acts.h of a function of ops.UNARY: kGeluTanh for gelu_tanh."""
    return f"k{kind.title().replace('_', '')}"


def gate_kind(kind: str, gates: dict[str, None]) -> str:
    """The enumerator of a gated product's activation, which is added to those that the library is compiled with."""
    name = unary_kind(kind)
    gates[name] = None
    return name


def code_range(kind: ActivationFormat) -> str:
    """The initializers of Q8Kind that say which codes an integer activation format has."""
    return ", ".join(f32(value) for value in (*kind.divisors, *([kind.top] if kind.clips else [])))


def f32(value: float) -> str:
    """The float32 nearest to `value`, as a C++ literal that parses back exactly."""
    text = format(struct.unpack("f", struct.pack("f", value))[0], ".9g")
    return text + ("f" if any(c in text for c in ".e") else ".0f")


def bound(value: float | None, sign: str) -> str:
    """A clamp bound; None is infinity with `sign`."""
    return f"{sign}__builtin_inff()" if value is None else f32(value)


def string(text: str) -> str:
    """A C++ string literal."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
