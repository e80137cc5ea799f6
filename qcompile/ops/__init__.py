"""The `qcompile::` operators: schema, fake kernel, torch reference body and stages of each, in one place.

The graph of every stage consists of these operators, so every stage can be run. Shapes use B batch, T tokens, M rows
of a step (the tokens of all sequences side by side), F features, H heads, D head size, V vocabulary. Leading
dimensions written `...` are free. References favor clarity over speed; generated kernels are tested against them.

`ops.linear` is the overload of qcompile::linear, and likewise for every operator that one of the modules defines.
"""

from typing import Any

from qcompile.ops import experts, model, quantized, recurrent, recurrent_step, step, weights  # noqa: F401  (each module defines its operators)
from qcompile.ops.model import NORMS, QUICK, UNARY
from qcompile.ops.quantized import GATE_BLOCK, GATED
from qcompile.ops.registry import DEFINED, STAGES, allowed, name_of, op, reference
from qcompile.ops.schema import arguments, has_operand, named, operand, operands, set_operands

__all__ = [
    "DEFINED",
    "GATED",
    "GATE_BLOCK",
    "NORMS",
    "QUICK",
    "STAGES",
    "UNARY",
    "allowed",
    "arguments",
    "has_operand",
    "name_of",
    "named",
    "op",
    "operand",
    "operands",
    "reference",
    "set_operands",
]


def __getattr__(name: str) -> Any:
    if name not in DEFINED:
        raise AttributeError(f"module 'qcompile.ops' has no attribute {name!r}")
    return DEFINED[name]
